"""The APIs that clients speak and an instance answers.

`forwarded` (llama-server's own endpoints: OpenAI's, Anthropic's, its own; stored responses),
`llama_server` (models, router mode, tools of engines), `ollama`, `generate` (plain generation),
`batch_completions`.
"""

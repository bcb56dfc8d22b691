"""The APIs that clients speak and an instance answers.

`forwarded` (llama-server's own endpoints: OpenAI's, Anthropic's, its own; stored responses),
`llama_server` (models and router mode), `ollama`, `generate` (plain generation),
`batch_completions`.
"""

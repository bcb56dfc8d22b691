"""The APIs that clients speak and an instance answers.

`forwarded` (llama-server's own endpoints: OpenAI's, Anthropic's, its own), `responses`, `ollama`,
`generate` (plain generation), `batch_completions`, `llama_server`, `router_mode`.
"""

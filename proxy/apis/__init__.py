"""The APIs that clients speak and an instance answers.

`forwarded` (llama-server's own endpoints: OpenAI's, Anthropic's, its own), `llama_server` (models
and router mode), `responses`, `ollama`, `generate` (plain generation), `batch_completions`.
"""

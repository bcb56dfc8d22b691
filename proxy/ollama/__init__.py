"""Ollama's API in front of the engine's own endpoints.

Source of all formats: Ollama, docs/api.md and api/types.go; its Python client, ollama 0.6.3.
"""

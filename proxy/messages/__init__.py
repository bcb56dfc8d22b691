"""Anthropic's messages whose format the engine's endpoint ignores, by way of its chat endpoint."""

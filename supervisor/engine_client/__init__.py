"""Client of one llama-server."""

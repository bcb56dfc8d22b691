"""Reads GGUF model files."""

"""Conversations that outlive their engine: slot files, each with a manifest."""

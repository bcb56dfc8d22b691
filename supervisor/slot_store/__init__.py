"""KV slot files on disk, each with a manifest."""

"""GGUF files where people already have them: found, named, served and removed."""

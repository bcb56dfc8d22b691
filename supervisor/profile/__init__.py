"""What to run: engines, their flags, profiles, and what a GGUF says of itself."""

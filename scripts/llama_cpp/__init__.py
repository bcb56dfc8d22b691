"""llama.cpp's own server tests, run on llama-corral."""

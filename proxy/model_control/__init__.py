"""Loading and unloading models by request, as llama-server's router mode does."""

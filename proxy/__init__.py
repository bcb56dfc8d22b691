"""Routes requests to llama-server processes; knows nothing of how they are run."""

"""llama.cpp's releases: which build suits this machine, and how it is installed."""

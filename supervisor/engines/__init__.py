"""llama-server binaries: found, probed, and what their --help offers."""

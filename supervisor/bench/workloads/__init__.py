"""What a bench asks of an engine: one file each, and the list of all in `registry`."""

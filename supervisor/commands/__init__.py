"""One module per family of verbs; each command returns data."""

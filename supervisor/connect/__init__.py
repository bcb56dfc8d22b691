"""Settings of client programs for the running daemon: what they are, written, and taken back."""

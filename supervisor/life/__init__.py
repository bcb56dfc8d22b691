"""One process: its states, its child, its logs, its end."""

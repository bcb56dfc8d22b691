"""One instance: its states, backoff and health."""

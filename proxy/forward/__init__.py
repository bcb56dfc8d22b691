"""Forwards requests to instances and relays their responses."""

"""Requests of clients in flight: listed, and cancelled by their id; those that ended."""

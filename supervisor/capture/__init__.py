"""Requests of one model with their responses, for as long as a capture runs."""

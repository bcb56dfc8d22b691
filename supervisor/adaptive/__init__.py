"""Follows demand and load while models serve: slots and decode threads."""

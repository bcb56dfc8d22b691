"""Searches the flags under which one model runs best on this machine."""

"""Plays the requests of a capture again, and compares speed and answers."""

"""Measures variants of one model on engines of its own."""

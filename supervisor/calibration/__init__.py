"""Measures how fast an engine is with several thread counts, when a model is first started."""

"""Owns llama-server processes: their command lines, their states, and their shares of a machine."""

__version__ = "0.1.0"

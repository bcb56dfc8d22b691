"""Owns llama-server processes: what to run, how one lives, how many share a machine."""

__version__ = "0.1.0"

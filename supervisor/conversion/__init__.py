"""Turns settings of other programs into `corral.toml`; reads texts, never runs a command."""

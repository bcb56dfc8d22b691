"""Coding agents from npm, run on llama-corral with a scripted model."""

"""Finds and probes llama-server builds."""

"""Limits on how much work one request can cause in an engine."""

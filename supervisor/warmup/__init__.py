"""Warm-up requests, and prompts prefilled ahead of clients."""

"""Requests that no client waits for one by one: batches of prompts."""

"""Queues, leases, and which instance gets which request."""

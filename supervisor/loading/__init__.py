"""Which models are in memory, and which are evicted for them.

`decide` is the pure rule, `memory_usage` what memory there is, `controller` loads and unloads.
"""

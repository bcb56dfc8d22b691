"""All models and their instances: planned, launched, reloaded, replaced.

`fleet` holds every `model`; `planner` plans and launches instances from the settings
(`model_entries`, `launches`, `start_memory`); `reload` applies new settings and `replace` changes
a running instance. `stats` and `cache_commands` read and command instances.
"""

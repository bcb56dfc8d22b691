"""All models and their instances: planned, launched, reloaded, replaced.

`fleet.Fleet` holds every `model.Model` and `model.Replica`. `planner.LaunchPlanner` plans and
launches instances from the settings, with `launches` and `start_memory`.
`reload.Reload` applies new settings, `replace.Replacer` changes a running instance. `stats` and
`cache_commands` read instances and command their caches.
"""

"""Small tools that know nothing of requests; the supervisor uses them too.

`background_tasks` (`persist`, `FAILURES`, `Throttle`, worker threads), `toml_text` (bounded TOML),
`toml_types` (types of settings tables), `path_length`, `headers` (fields that cross the proxy),
`least_squares`.
"""

"""Endpoints that the proxy answers itself.

`local` (health, models, slots), `prometheus` (`/metrics`), `slots` and `requests` (`/corral/v1/…`),
`prompts` (estimate, warm), `usage`, `engine_ui`.
"""

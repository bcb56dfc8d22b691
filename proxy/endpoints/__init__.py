"""Endpoints that the proxy answers itself.

`local` (health, models), `prometheus`, `slots`, `requests`, `prompts` (estimate, warm), `usage`,
`engine_ui`.
"""

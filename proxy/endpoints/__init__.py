"""Endpoints that the proxy answers itself.

`local` (health, models, slots), `prometheus` (`/metrics`), `slots` and `requests` (`/corral/v1/…`;
usage too), `prompts` (estimate, warm), `engine_ui`.
"""

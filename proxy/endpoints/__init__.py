"""Endpoints that the proxy answers itself.

`local` (health, models, slots, warming), `prometheus` (`/metrics`), `slots` and `requests`
(`/corral/v1/…`; usage and estimates too), `slot_files` (for other machines), `engine_ui`.
"""

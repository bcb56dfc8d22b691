"""Measures variants of one model on separate engines, and searches for the fastest.

`runner` measures `variants` under `standard_workloads`; `figures` interprets the values,
`html_report` shows them. `tune` searches flags (`tune_space`, `tune_search`).
"""

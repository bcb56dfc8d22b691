"""Measures variants of one model on engines of its own, and searches for the fastest.

`runner` measures `variants` under `standard_workloads`; `figures` says what the values mean,
`html_report` shows them. `tune` searches flags (`tune_space`, `tune_search`).
"""

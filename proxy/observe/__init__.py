"""Records of requests, and the forms in which they are shown.

`record` (`AccessRecord`, its events), `timeline` (phases), `metrics` (counters, the engines' own
metrics), `tracing` (OpenTelemetry), `in_flight` and `past` (requests), `cache_finding` and
`explanation` (why a request was slow).
"""

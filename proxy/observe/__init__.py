"""Records of requests, and the forms in which they are shown.

`record` (`AccessRecord`, requests in flight), `timeline` (phases), `metrics` (counters, the
engines' own metrics), `tracing` (OpenTelemetry), `past` (ended requests), `cache_finding` and
`explanation` (why a request was slow).
"""

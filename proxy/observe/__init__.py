"""Records of requests, and the forms in which they are shown.

`record` (`AccessRecord`, phases, requests in flight), `metrics` (counters, the
engines' own metrics), `tracing` (OpenTelemetry), `past` (ended requests), `cache_finding` and
`explanation` (why a request was slow).
"""

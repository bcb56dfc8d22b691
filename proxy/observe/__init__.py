"""What is recorded of requests, and how it is shown.

`record` (`AccessRecord`), `timeline`, `metrics` (counters, the engines' own metrics), `tracing`,
`in_flight`, `past` (requests that have ended), `cache_finding` and `explanation`.
"""

"""Keeps figures of served requests on disk, never their texts.

`history` keeps ended requests in SQLite; `usage`, `usage_files` and `usage_recorder` keep sums per
API key and model; `request_sizes` keeps sizes and pauses for `corral bench --workload yours`.
"""

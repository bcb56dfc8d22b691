"""What the daemon remembers of served requests: figures only, never a text.

`history` keeps ended requests in SQLite (`request_database`); `usage`, `usage_files` and
`usage_recorder` keep sums per API key and model; `request_sizes` keeps sizes and pauses for
`corral bench --workload yours`.
"""

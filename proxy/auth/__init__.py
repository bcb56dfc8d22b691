"""Who sends a request, and what it may do: keys, limits, origins and sessions.

`api_keys` (`ApiKeys`, `KEY`), `keys_file`, `key_limits` (`Admission`, `TokenLimits`), `origin`,
`sessions`, `access` (`Access`, the paths with rules of their own).
"""

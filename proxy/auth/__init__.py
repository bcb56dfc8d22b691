"""Who sends a request, and what it may do: keys, limits, origins and sessions.

`api_keys` (`ApiKeys`, `KEY`, `Admission`, `TokenLimits`), `keys_file` (`Key`), `access` (`Access`,
`OriginPolicy`, the paths with special rules), `auth_proxy` (`AuthProxy`: users that a reverse proxy
has signed in), `sessions` (`Sessions`).
"""

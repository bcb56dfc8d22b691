"""From an HTTP request to a `ProxyRequest`: model, members, limits.

`request` (`read_request`, `ProxyRequest`), `models` (what the proxy needs of the supervisor),
`variants` (variants and LoRA adapters), `limits` and `grammar`, `stored_responses`, `keep_alive`.
"""

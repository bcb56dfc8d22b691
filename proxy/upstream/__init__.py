"""An instance as an HTTP server: its address, one request to it, and the response.

`upstream` (`Upstream`, `Node`, `Timings`), `client` (`send`, `fetch`), `http1` (with events),
`engine_state` (`/slots`, `/metrics`), `endpoint_kinds` (llama-server's endpoints).
"""

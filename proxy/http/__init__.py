"""The client's side of HTTP: connections, TLS, middleware, routes, bodies and forms.

`middleware` (`RequestMiddleware`, `Routes`, `json_response`), `body` (`Bodies`, `read_body`),
`forms` (`Form`), `tls`, `connections` (`Connection`, `Connections`), `api_formats` (`ApiFormat`).
"""

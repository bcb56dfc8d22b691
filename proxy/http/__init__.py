"""The client's side of HTTP: connections, TLS, middleware, routes, bodies and forms.

`middleware` (`RequestMiddleware`), `routes` (`Routes`, `json_response`), `body` (`Bodies`,
`read_body`), `forms`, `tls`, `connections`, `error_responses`.
"""

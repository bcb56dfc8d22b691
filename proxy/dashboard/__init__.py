"""The server's side of the dashboard; `page/` has the files that a browser loads.

`dashboard` (`Dashboard`), `host` (what it needs of the supervisor), `live` (`/corral/v1/live`),
`state`.
"""

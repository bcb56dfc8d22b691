"""The server's side of the dashboard; `page/` has the files for the browser.

`dashboard` (`Dashboard`), `host` (its interface to the supervisor), `live` (`/corral/v1/live`),
`machines` (`/corral/v1/machine`, `/corral/v1/machines`), `machine_models` (`/corral/v1/models`),
`bench` (`/corral/v1/bench`), `hub` (`/corral/v1/hub`, `/corral/v1/downloads`), `settings_file`
(`/corral/v1/settings`), `state` (the state that the page shows).
"""

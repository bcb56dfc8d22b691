"""Implements the proxy's host interfaces with parts of the supervisor.

`models` lists, loads and unloads models, `slot_storage` prefills prompts and moves slot files,
`dashboard` (with `client_settings`) and `ollama` serve those interfaces, `request_records` connects
usage, history and the router's events, `proxy_settings` checks `[proxy]`.
"""

"""Implements the proxy's host interfaces with parts of the supervisor.

`models` lists, loads and unloads models, `slot_storage` prefills prompts and forgets conversations,
`slot_exchange` copies slot files between machines, `dashboard`, `machine_models`, `bench`, `hub`
and `ollama` serve those interfaces, `usage` records usage and reads records, `proxy_settings`
checks `[proxy]` and applies changes of it, `settings_file` checks all settings and edits their
file.
"""

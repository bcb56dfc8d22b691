"""What the proxy asks of its host, implemented with the parts of the supervisor.

`models` lists and loads models, `slot_storage` saves and restores slots, `dashboard` and `ollama`
serve those interfaces, `request_records` passes on what was used, `proxy_settings` checks [proxy].
"""

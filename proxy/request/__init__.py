"""From an HTTP request to a `ProxyRequest`: its model, members and limits.

`request` (`read_request`, `ProxyRequest`), `models` (the proxy's view of the supervisor),
`variants` (variants and LoRA adapters), `limits`, `engine_members`, `tools`, `stored_responses`,
`chat_form` (the chat with the same prompt).
"""

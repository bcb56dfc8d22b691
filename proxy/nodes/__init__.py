"""Other machines whose models are served here too.

`nodes` (`Nodes`, the face of the package), `settings` (`[nodes.NAME]`), `configured`, `monitor`,
`model_list`, `loading`, `slot_files`; `dns_resolver`, `mdns` and `files` are imported only when
needed.
"""

"""What is believed of the engines' prompt caches, and whether saving a slot pays.

`prompt` (hashes of a prompt), `index` (`PrefixIndex`: who holds most of it), `slot_map`,
`host_cache`, `slot_files`, `remote_prefixes`, `save_policy`, `miss_cause`.
"""

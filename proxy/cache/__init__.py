"""Beliefs about the engines' prompt caches, and the decision whether to save a slot.

`prompt` hashes a prompt; `index` (`PrefixIndex`) says which instance holds most of it. `slot_map`,
`host_cache`, `slot_files` and `remote_prefixes` track the places that can hold it. `save_policy`
decides on saves, `miss_cause` explains misses.
"""

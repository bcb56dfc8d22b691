"""Beliefs about the engines' prompt caches, and the decision whether to save a slot.

`prompt` hashes a prompt; `index` (`PrefixIndex`) says which instance holds most of it, from its
`holders`: processes, slot files, other machines. `slot_map` and `host_cache` track the places in a
process that can hold it. `save_policy` decides on saves, `miss_cause` explains misses,
and `prompt_rules` undoes changes of clients that cause them.
"""

"""Model files: their GGUF metadata, where they are stored, where they come from.

`gguf`, `tensors` and `metadata` read files; `stored_model`, `local_stores` and `catalogue` know
what is on this machine; `hub`, `repository`, `transfer` and `pinned` fetch more; `reference` and
`file_names` read what a word or a file name means.
"""

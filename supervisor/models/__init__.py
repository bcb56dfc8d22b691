"""Reads model files, finds them on this machine, and downloads them.

`gguf`, `tensors` and `metadata` read GGUF files. `stored_model`, `local_stores`, `catalogue` and
`model_lookup` find stored models. `hub`, `repository`, `transfer` and `pinned` download models.
`reference` and `file_names` parse the names that users and repositories give.
"""

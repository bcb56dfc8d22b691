"""KV slot files on disk, each with a manifest: saved, verified, restored, deleted.

`manager` saves and restores the slots of a replica (`slot_transfer`); `slot_files` holds all files
of a daemon (`file_index` in memory, `store` on disk); `policy` and `save_limits` decide;
`slot_file`, `manifest` and `encryption` are the formats.
"""

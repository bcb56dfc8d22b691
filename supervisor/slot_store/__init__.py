"""KV slot files on disk, each with a manifest: saved, verified, restored, deleted.

`manager.SlotManager` saves and restores the slots of a replica (`slot_transfer`).
`slot_files.SlotFiles` holds the files of a daemon: `file_index.Catalogue` in memory,
`store.SlotStore` on disk, as `store_config` sets it up. `policy` and `save_limits` decide;
`slot_file`, `manifest` and `encryption` are the formats.
"""

"""The machine and the operating system: directories, files, locks, resources, downloads.

`paths`, `files` and `toml_file` for the disk; `machine`, `processor_load` and `energy` for what the
machine has and uses; `daemon_lock` and `ownership` for processes and users. Knows nothing of
models.
"""

"""The machine and the operating system: directories, files, locks, resources, downloads.

`paths`, `files` and `toml_file` for the disk; `machine`, `processor_load` and `energy` for the
machine's resources and their use; `daemon_lock` and `ownership` for processes and users. Knows
nothing of models.
"""

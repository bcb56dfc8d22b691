"""Merges `corral.toml`, the environment and the command line into one frozen value, `Settings`.

`schema` and `tables` declare every setting, `load` reads and checks them, and `messages` explains
errors. `stored_models` adds models of the stores. `edit` changes the file in place, and `reference`
lists all keys. `import_source` converts the settings of other programs; its readers are the other
`import_…` modules.
"""

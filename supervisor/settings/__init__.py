"""`corral.toml`, the environment and the command line, as one frozen value.

`schema` and `tables` declare every setting, `load` reads and checks them, `edit` changes the file
in place, `messages` explains what is wrong, `reference` lists all keys. `import_source` turns
settings of other programs into ours.
"""

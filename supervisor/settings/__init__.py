"""`corral.toml`, the environment and the command line, as one frozen value.

Later wins: defaults, the file, the environment (`CORRAL_PROXY__LISTEN`), the command line. The file
is the first found of `--config`, `CORRAL_CONFIG`, `./corral.toml` and `corral.toml` in the user's
config directory. An unknown key is an error that names the nearest one. Model names are checked
here, once: what passes is safe as part of a file name.
"""

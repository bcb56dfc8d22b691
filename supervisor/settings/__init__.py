"""`corral.toml`, the environment and the command line, as one frozen value.

Later wins: defaults, the file, the environment (`CORRAL_PROXY__LISTEN`), the command line. The file
is the first of `--config`, `CORRAL_CONFIG`, `./corral.toml` and `corral.toml` in the user's config
directory. Model names are checked here, once: a valid one is safe as part of a file name.
"""

"""Reading configuration: types of settings, and limits of TOML and paths."""

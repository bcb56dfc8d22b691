"""Client programs from npm and PyPI, run with the settings that corral connect writes."""

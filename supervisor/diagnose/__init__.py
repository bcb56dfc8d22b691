"""Finds what is wrong with an installation, and collects what a bug report needs.

`doctor` runs every check (`host_checks` and its own); `report` and `log_excerpt` make the archive
of a report: no keys, and no prompts unless they are asked for.
"""

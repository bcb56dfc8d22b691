"""Finds problems of an installation, and collects the files of a bug report.

`doctor.run_checks` runs every check, those of `host_checks` included; each yields a `Finding`.
`report` makes the archive of a report: no secrets, and prompts only on request.
"""

"""Keeps figures of served requests in one SQLite file, never their texts.

`store` is the file, `requests` and `usage` are its tables, and `older` takes over the files of
older versions. In the daemon, `writer` writes batches, and `accounting` counts what keys use.
"""

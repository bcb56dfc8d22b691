"""Keeps figures of served requests in one SQLite file, never their texts.

`store` is the file, `requests` and `usage` are its tables, and `older` takes over the files of
older versions. In the daemon, `writer` appends to a journal, and adds it to the file in batches.
"""

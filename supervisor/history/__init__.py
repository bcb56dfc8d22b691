"""Requests that have ended, in a database: figures only, never a text of theirs."""

"""Writes the running daemon's address and models into settings files of client programs.

`programs` is the table of all programs, and the facts that its rows get. `journal` edits their
files in place, and takes the changes back.
"""

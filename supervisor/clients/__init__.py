"""Writes the running daemon's address and models into settings files of client programs.

`programs` is the table of all programs, `client` the types of its rows and the facts they get.
`journal` edits their files in place, and takes the changes back.
"""

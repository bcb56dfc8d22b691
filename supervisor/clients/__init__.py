"""Writes the running daemon's address and models into settings files of client programs.

`programs` is the table of all programs, `client` the types of its rows and the facts they get.
`journal` writes values and takes them back; `formats` edits files in place.
"""

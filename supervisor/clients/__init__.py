"""Settings of client programs for the running daemon: what they are, written, and taken back.

`programs` has the table of all programs, `client` what each is told, `journal` what is written;
`formats` edits their files in place.
"""

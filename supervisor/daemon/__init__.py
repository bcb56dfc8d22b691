"""The daemon: its parts, what connects them, and its control socket.

`daemon` runs the `parts` and shuts them down in order; `control_server` and `operations` serve
commands, `control_client` is their side, `control_messages` the JSON between them.
"""

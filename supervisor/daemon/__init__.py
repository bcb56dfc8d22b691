"""The daemon: its parts, how they are connected, and its control socket.

`daemon.Daemon` runs `parts.DaemonParts` and shuts them down in order. `control_server` serves the
control socket with `operations.DaemonService`; commands use `control_client.Client`;
`control_messages` defines the JSON between both, and the `*_status` modules build it.
"""

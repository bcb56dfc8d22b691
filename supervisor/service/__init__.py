"""Runs the daemon as a service of the operating system, and the user's hooks.

`notifier` reports to systemd and takes its sockets, `units` writes and installs unit files, `hooks`
turns events into runs of the user's commands (`hook_commands`), `slurm` runs daemons as tasks of a
cluster.
"""

"""The daemon as a service of systemd: its notifications, sockets, unit files and commands."""

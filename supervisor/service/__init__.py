"""The daemon as a service of the operating system: systemd, unit files, hooks.

`notifier` tells systemd what the daemon does, `units` writes and installs unit files, `hooks` runs
the user's commands when something happens (`hook_commands`).
"""

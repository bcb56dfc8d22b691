"""The daemon's own interface: JSON over a private unix socket."""

"""TLS of the listening address and of connections to nodes; certificates are renewed live."""

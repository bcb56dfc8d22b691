"""Memory that an instance needs, and whether it fits."""

"""What an instance takes of memory, and whether it fits."""

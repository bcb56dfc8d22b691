"""HTTP/1.1 with one instance."""

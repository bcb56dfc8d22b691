"""`corral top`: models and requests in a terminal."""

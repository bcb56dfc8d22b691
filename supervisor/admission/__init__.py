"""Which models are in memory, and which are evicted for them."""

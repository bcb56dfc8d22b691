"""Which instance holds a conversation in its cache."""

"""What the router needs of the store that keeps KV caches on disk."""

"""Request bodies: read, decompressed, bounded and parsed before anything else sees them."""

"""What speculative decoding brings."""

"""How much work one request may ask of an engine, beyond the size of its body."""

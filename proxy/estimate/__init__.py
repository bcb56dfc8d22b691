"""When a request's first token comes: measured figures, and a model of the engine. Pure."""

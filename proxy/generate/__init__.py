"""Plain endpoints: text and tokens in, text and tokens out; and what of a model is on GPUs."""

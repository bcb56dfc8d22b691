"""Formats of settings files: values are read, set and removed in their text; the rest stays."""

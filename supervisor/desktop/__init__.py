"""The daemon as the backend of desktop applications."""

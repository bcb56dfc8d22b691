"""The instances, and HTTP with them."""

"""Health, models, slots and metrics of the proxy and its instances."""

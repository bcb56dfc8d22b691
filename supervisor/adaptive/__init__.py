"""Values of running models that follow demand and machine."""

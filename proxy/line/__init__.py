"""Who waits, and who gets a slot of which instance."""

"""What is believed of the prompt caches of all instances."""

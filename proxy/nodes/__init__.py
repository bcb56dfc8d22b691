"""Other machines whose models are served here too."""

"""One module per family of verbs. A command returns data, or raises a CorralError to show."""

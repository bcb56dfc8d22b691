"""What responses say, one file for each API."""

"""Who used how much: tokens and seconds per API key and model, day and month. No text."""

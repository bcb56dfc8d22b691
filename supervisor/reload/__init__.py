"""New settings applied to what runs."""

"""Profiles, settings and machine to the command line of one instance."""

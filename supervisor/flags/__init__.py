"""The command line of an instance, from profile, settings and machine."""

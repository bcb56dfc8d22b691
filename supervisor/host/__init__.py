"""Where the daemon lives: directories, locks, the service manager."""

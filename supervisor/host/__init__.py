"""The machine: directories, files, locks, resources."""

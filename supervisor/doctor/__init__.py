"""What serving needs on this machine: what is fine, what is not, and what to do about it."""

"""Where the two packages meet: neither knows the other, these files know both."""

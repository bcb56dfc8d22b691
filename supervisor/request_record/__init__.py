"""Sizes and pauses of served requests on disk, for `corral bench --workload yours`. No text."""

"""Joins supervisor and proxy."""

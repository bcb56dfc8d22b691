"""Experiments with served requests: trials, canaries, captures, replays.

`trials` compares two configurations of a model in service, and `verdict` says which is better; a
canary (`canaries`) is a trial of an engine with a deadline. `capture` records requests with their
responses as `capture_lines`, and `replay` plays them again.
"""

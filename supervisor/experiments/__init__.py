"""Experiments with served requests: trials, canaries, captures, replays.

`trials` and `canary_runner` compare two configurations of a model in service, `verdict` says which
is better; `capture` records requests with their responses, and `replay` plays them again.
"""

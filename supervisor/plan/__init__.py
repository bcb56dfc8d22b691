"""The command line of an instance and its memory, derived from profile, settings and machine.

`plan` is the entry: it merges settings (`resolve`), derives each `auto` (`auto`, `embedding`,
`draft`), renders for the build at hand (`render`) and estimates memory (`estimate`, `fit`). Pure
but for reading profiles and model files.
"""

"""Finds llama.cpp builds on this machine, probes them, and installs new ones.

`discover` finds engines; `probe` runs their programs and `help` parses their options. `releases`
reads llama.cpp's releases, `variant` chooses the files for this machine, and `install` installs
them. `from_source` compiles builds. `installed` knows the installed builds and the build in use.
"""

"""llama.cpp builds: found, probed, chosen, installed.

`discover` finds engines, `probe` and `help` read what each can do; `releases`, `variant` and
`install` bring llama.cpp's releases; `installed` knows which build is in use.
"""

"""Values of running models that follow demand and machine: slots, threads, layers.

`slots` and `threads` decide, `apply` samples and applies what they want, `layer_mover` moves
layers between RPC workers.
"""

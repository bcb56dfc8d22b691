"""RPC workers (`ggml-rpc-server`) that compute layers of models, and how layers are divided.

`worker` and `pool` run workers on this machine, `address` finds others; `shards` plans which
layers each gets, `relay` measures them while they serve, and `balance` decides what should move.
"""

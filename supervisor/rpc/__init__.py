"""RPC workers (`ggml-rpc-server`) that compute layers of models, and how layers are divided.

`worker.Worker` and `pool.WorkerPool` run workers on this machine; `address` probes them, and
`model_workers.ModelWorkers` has those of each model. `shards` plans the layers of each,
`relay.ShardRun` measures them while they serve, `balance` decides which layers should move.
"""

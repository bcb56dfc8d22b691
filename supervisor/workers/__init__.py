"""RPC workers: `ggml-rpc-server` processes that compute layers for models."""

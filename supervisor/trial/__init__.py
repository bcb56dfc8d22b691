"""Live trial: figures of a model whose trial serves a share of the conversations."""

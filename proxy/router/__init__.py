"""Which instance answers which request, in which slot, and when.

`router` (`Router`, the face, and its signals), `lease` (`Lease`, `RoutingTarget`), `registry`,
`model_queue`, `queue`, `candidates` (the policies), `slots`, `slot_saver`, `node_files`,
`engine_faults`, `batch_queue`, `estimator`.
"""

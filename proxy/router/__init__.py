"""Which instance answers which request, in which slot, and when.

`router` (`Router`, the face of the package), `lease` (`Lease`, `RoutingTarget`), `queue`,
`model_queue`, `policy` (the pure rule), `assignment`, `choose_slot`, `slot_saver`, `estimator`.
"""

"""Values of running models that follow demand and machine: slots, threads, drafts, layers.

`slots.SlotDecider`, `threads.ThreadDecider` and `drafts.DraftDecider` decide;
`apply.AdaptiveController` samples, and applies their changes by replacing instances.
`layer_mover.LayerMover` moves layers between RPC workers.
"""

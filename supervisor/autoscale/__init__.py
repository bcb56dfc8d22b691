"""Values of running models that follow demand and machine: slots, threads, layers.

`slots.SlotDecider` and `threads.ThreadDecider` decide; `apply.AdaptiveController` samples, and
applies their changes by replacing instances. `layer_mover.LayerMover` moves layers between RPC
workers.
"""

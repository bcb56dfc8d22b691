"""Which models are in memory, and which are evicted for them.

`decide.decide` is the pure rule, `memory_usage.MemoryUsage` has the memory of models and machine,
`controller.AdmissionController` loads and unloads, `device_yield.DeviceYield` leaves the devices to
other programs.
"""

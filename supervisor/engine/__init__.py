"""One llama-server process: its lifecycle, output, exit cause, health and requests to it.

`instance.Instance` acts on the table in `states`; `state_tasks` has the task of each state,
`health` and `backoff` decide, `run` and `child` hold the process that a `launch.Launch` describes.
`exit_cause` explains an exit, `client.EngineClient` sends requests, `warmup`, `prompts` and
`calibration` prefill and measure a new run, `log_file` keeps its output, `orphans` kills leftovers.
"""

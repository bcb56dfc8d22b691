"""One llama-server process: its lifecycle, output, exit cause, health and requests to it.

`instance` acts on the state table in `states`; `state_tasks` does the work of a state, `health`
decides, `run` and `child` hold the process, `exit_cause` explains its end. `client` talks to it,
`warmup` and `prompts` prefill it.
"""

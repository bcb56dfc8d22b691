"""Routes requests to llama-server processes, independent of how they are run.

Floors, each of which imports only lower ones: `common`, `errors`, `settings`; `observe`, `http`,
`upstream`, `auth`; `request`, `cache`; `router`, `nodes`; `forward`; `apis`, `endpoints`,
`batches`, `dashboard`; `app`, `server`.
"""

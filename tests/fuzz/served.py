"""Settings and keys of the daemon under attack."""

from __future__ import annotations

from typing import Final

from fuzz.request import KEY, LIMITED_KEY, NEIGHBOUR_KEY

SETTINGS: Final = """
[proxy]
listen = "127.0.0.1:0"
api_keys_file = "keys.toml"
header_timeout_s = 4
body_timeout_s = 4
queue_timeout_s = 20

[supervisor.restart]
backoff_initial_s = 0.2
backoff_max_s = 1

[models.m]
path = "{slow}"
replicas = 2
aliases = ["alias"]
[models.m.flags]
parallel = 2
ctx-size = 4096
[models.m.variants.high]
temperature = 1.0
set = {{ seed = 7 }}
strip = ["logit_bias"]

[models.embed]
path = "{tiny}"
[models.embed.flags]
embeddings = true
pooling = "mean"

[models.later]
path = "{tiny}"
preload = false
ttl_s = 5
"""
KEYS: Final = f"""
[keys.fuzz]
key = "{KEY}"
[keys.limited]
key = "{LIMITED_KEY}"
models = ["embed"]
max_in_flight = 1
requests_per_minute = 600
[keys.neighbour]
key = "{NEIGHBOUR_KEY}"
"""

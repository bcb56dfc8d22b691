"""Plain endpoints of a running daemon."""

from __future__ import annotations

from pathlib import Path

import httpx
from support.corral_cli import CorralCli, until


def test_a_warm_up_loads_a_model_and_says_where_it_runs(
    corral: CorralCli, tiny_model: Path
) -> None:
    """Seed 003: GpuWarmupResponse and GpuStatusResponse of a machine."""
    corral.configure(
        f'[models.tiny]\npath = "{tiny_model}"\npreload = false\nflags = {{ gpu-layers = 0 }}\n'
    )
    corral.serve(until_ready=False)
    until(corral.is_running)
    with httpx.Client(base_url=corral.url, timeout=60) as http:
        assert corral.model_states() == {"tiny": "unloaded"}
        warmed = http.post("/v1/gpu/warmup").json()
        assert corral.model_states() == {"tiny": "loaded"}
        status = http.get("/v1/gpu/status").json()
        runtime = http.get("/corral/v1/runtime").json()
        generated = http.post("/generate", json={"prompt": "abc", "max_tokens": 3}).json()
    assert (warmed["success"], warmed["num_layers"]) == (False, 0)
    assert warmed["message"] == "tiny is loaded and runs on the CPU: no layer of it is on a GPU"
    assert (status["cache_ready"], status["cache_memory_bytes"]) == (False, 0)
    (listed, *_) = corral.data("engine", "list")
    assert runtime == {name: listed[name] for name in runtime}
    assert len(runtime) == 5
    assert generated["num_generated"] == len(generated["token_ids"]) == 3

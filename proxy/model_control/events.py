"""What `/models/sse` sends: changes of the models that a client may see. Pure.

Source: tools/server/server-models.cpp of llama.cpp, build 10434.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import orjson

from proxy.metrics.models_endpoint import model_json
from proxy.models import ModelInfo

Event = Mapping[str, object]

# llama-server reports stages; of several replicas there is one figure for all.
_STAGE: Final = "text_model"
_FAILED_CODE: Final = 1


@dataclass(frozen=True, slots=True)
class Shown:
    """What of a model is sent.

    Attributes:
        status: In llama-server's words.
        progress: Of its load, 0 to 1; None where it does not load, or that is not known.
        model_info: What a client gets once it is loaded.
    """

    status: str
    is_failed: bool = False
    progress: float | None = None
    model_info: ModelInfo | None = field(default=None, compare=False)


def shown(model_info: ModelInfo) -> Shown:
    if model_info.state == "failed":
        return Shown("unloaded", is_failed=True)
    return Shown(model_info.state, progress=model_info.load_progress, model_info=model_info)


def events_between(before: Mapping[str, Shown], after: Mapping[str, Shown]) -> Iterator[Event]:
    """Yield the events that tell a client who knows `before`, by model, what is true now."""
    for model in before.keys() - after.keys():
        yield {"model": model, "event": "model_remove"}
    if after.keys() - before.keys():
        yield {"model": "*", "event": "models_reload"}
    for model, now in after.items():
        if before.get(model, now) != now:
            yield {"model": model, "event": "status_change", "data": _data(now)}


def event_text(event: Event) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _data(now: Shown) -> dict[str, object]:
    data: dict[str, object] = {"status": now.status}
    if now.status == "unloaded":
        data["exit_code"] = _FAILED_CODE if now.is_failed else 0
    if now.status == "loaded" and now.model_info:
        data["info"] = model_json(now.model_info)
    if now.progress is not None:
        data["progress"] = {"stages": [_STAGE], "current": _STAGE, "value": now.progress}
    return data

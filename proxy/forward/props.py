"""`/props`: without paths of this machine, and remembered while its model is not loaded.

Without a name among several models it is that of llama-server's router mode, with the members of
the default model where there is one.

Editors request it for every model in the list, and a web page can make a browser request it, so it
never loads a model. The last response of a model's instance is repeated until the model changes.

Source: llama-server, builds 10434 and 11434: `model_path`, and `is_sleeping` for a model that is
out of memory and returns with a request; `get_router_props` of tools/server/server-models.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Final

import orjson
from aiohttp import web

from proxy.access_log import AccessRecord
from proxy.forward.rewritten_response import RewrittenResponse
from proxy.headers import JSON
from proxy.models import ModelInfo

PATH: Final = "/props"
# Chat templates are the most of it; the longest known has 30 kB.
_MAX_BYTES: Final = 1024**2
# What tells clients that there are several models, which a request loads.
ROUTER: Final[Mapping[str, object]] = MappingProxyType({"role": "router", "models_autoload": True})
NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Seen:
    body: bytes
    context_length: int | None
    slots: int
    at_s: float


class Remembered:
    """The last response for each configured model."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def keep(self, model_info: ModelInfo, body: bytes, known: Collection[str]) -> None:
        """Remember the response of a model, and forget models that are not in `known`."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in known}
        self._seen[model_info.id] = _Seen(
            body, model_info.context_length, model_info.slots, self._clock()
        )

    def page(
        self, model_info: ModelInfo, added: Mapping[str, object] = NOTHING
    ) -> web.Response | None:
        """Return the last response for a model, or None where there is none or the model changed.

        Members are `added` to it. `Age` is in seconds (RFC 9111 section 5.1).
        """
        seen = self._seen.get(model_info.id)
        if seen is None or (seen.context_length, seen.slots) != (
            model_info.context_length,
            model_info.slots,
        ):
            return None
        members = orjson.loads(seen.body)
        if "is_sleeping" in members:
            members["is_sleeping"] = True
        age_s = int(self._clock() - seen.at_s)
        headers = {"Content-Type": JSON, "Age": str(age_s)}
        return web.Response(body=orjson.dumps({**members, **added}), headers=headers)


class PropsResponse(RewrittenResponse):
    """A response without paths, and with the members that are `added`.

    Attributes:
        page: The body without those, where the request succeeded.
    """

    max_bytes = _MAX_BYTES

    def __init__(
        self,
        request: web.BaseRequest,
        record: AccessRecord,
        added: Mapping[str, object] = NOTHING,
    ) -> None:
        super().__init__(request, record)
        self._added = added
        self.page: bytes | None = None

    def rewritten(self, status: int, body: bytes) -> bytes:
        shown = without_paths(body)
        if status != web.HTTPOk.status_code or not shown.startswith(b"{"):
            return shown
        self.page = shown
        return orjson.dumps({**orjson.loads(shown), **self._added}) if self._added else shown


def router_page(models: int) -> dict[str, object]:
    """`/props` where none of so many models is meant, or none whose properties are known.

    The members are those of llama-server's own page.
    """
    return {
        **ROUTER,
        "max_instances": models,
        "build_info": "llama-corral",
        "ui_settings": {},
        "cors_proxy_enabled": False,
        "model_alias": "llama-corral",
        "model_path": "none",
        "default_generation_settings": {"params": None, "n_ctx": 0},
    }


def without_paths(body: bytes) -> bytes:
    """Reduce `model_path` to the name of the file."""
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(members, dict) or not isinstance(members.get("model_path"), str):
        return body
    return orjson.dumps({**members, "model_path": file_name(members["model_path"])})


def file_name(path: str) -> str:
    """The last part of a path of this system or of Windows."""
    return PurePosixPath(PureWindowsPath(path).name).name

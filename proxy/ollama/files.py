"""`/api/pull` and `/api/delete`: models that clients download and delete, where that is allowed."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.auth.api_keys import KEY, client_models
from proxy.body.bodies import Bodies, Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.errors import BadRequest, Forbidden, ProxyError
from proxy.headers import RESPONSE_HEADERS
from proxy.json_response import json_response
from proxy.models import ModelLoader, ModelNames
from proxy.ollama.host import OllamaHost, Progress
from proxy.ollama.names import required_name, untagged
from proxy.ollama.response import LINES
from proxy.request import client_of

_SUCCESS: Final = {"status": "success"}


class ModelFiles:
    """A key that may use only some models downloads and deletes none."""

    def __init__(self, loader: ModelLoader, host: OllamaHost, bodies: Bodies) -> None:
        self._loader = loader
        self._host = host
        self._bodies = bodies

    async def pull(self, request: web.BaseRequest) -> web.StreamResponse:
        """Download a model, and tell the progress in lines; what is served already is there.

        Raises:
            ProxyError: As `OllamaHost.pull`, before the first line.
        """
        members = await self._read(request)
        name, names = required_name(members), self._names(request)
        if names.get(untagged(name, names) or ""):
            progress = _nothing()
        else:
            self._check(request)
            progress = self._host.pull(name)
        if members.get("stream") is not False:
            return await _stream(request, progress)
        async with aclosing(progress):
            async for _ in progress:
                pass
        return json_response(_SUCCESS)

    async def delete(self, request: web.BaseRequest) -> web.Response:
        """Delete a model; raises as `OllamaHost.delete`, and UnknownModel."""
        name = required_name(await self._read(request))
        self._check(request)
        names = self._names(request)
        short = untagged(name, names) or ""
        found = names.resolve(short)
        # The id of a model of the hub has no slash.
        if found.model_info.id not in {short, short.replace("/", "--")}:
            raise BadRequest(f"{name} is another name of {found.model_info.id}; delete that")
        await self._host.delete(found.model_info.id)
        return web.Response()

    def _check(self, request: web.BaseRequest) -> None:
        if not self._bodies.settings.ollama.manage_models:
            raise Forbidden(
                "clients may not download or delete models here; "
                "to allow it, set manage_models = true under [proxy.ollama]"
            )
        if (key := request[KEY]) and key.models is not None:
            raise Forbidden("this API key may use only some models, so it may not change them")

    def _names(self, request: web.BaseRequest) -> ModelNames:
        return ModelNames(client_models(self._loader, request))

    async def _read(self, request: web.BaseRequest) -> dict[str, Any]:
        with self._bodies.share(client_of(request)) as share:
            return await members_in(request, share)


async def members_in(request: web.BaseRequest, share: Share) -> dict[str, Any]:
    """Read a small body; raises as `read_body` and `check_complexity`."""
    body = await read_body(request, share)
    await check_complexity(body, share)
    return members_of(body)


async def _stream(
    request: web.BaseRequest, progress: AsyncGenerator[Progress, None]
) -> web.StreamResponse:
    own = request[RESPONSE_HEADERS]
    response = web.StreamResponse(headers={"Content-Type": LINES, **own})
    async with aclosing(progress):
        try:
            async for step in progress:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(_line(_members(step)))
        except ProxyError as error:
            if not response.prepared:
                raise
            await response.write(_line({"error": error.message}))
        else:
            if not response.prepared:
                await response.prepare(request)
            await response.write(_line(_SUCCESS))
    await response.write_eof()
    return response


def _members(step: Progress) -> Mapping[str, object]:
    if not step.total_bytes:
        return {"status": step.status}
    digest = hashlib.sha256(step.file.encode()).hexdigest()
    return {
        "status": f"{step.status} {step.file}",
        "digest": f"sha256:{digest}",
        "total": step.total_bytes,
        "completed": step.completed_bytes,
    }


def _line(members: Mapping[str, object]) -> bytes:
    return orjson.dumps(members, option=orjson.OPT_APPEND_NEWLINE)


async def _nothing() -> AsyncGenerator[Progress, None]:
    """Tell of a model that is there."""
    yield Progress("pulling manifest")

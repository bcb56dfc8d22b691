"""`POST /batch/tokenize`: the tokens of many texts, each from a request of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.batch.requests import OwnAnswer, OwnRequests
from proxy.batch.result_writer import BatchRefused, write_whole
from proxy.body.bodies import Share
from proxy.body.read import check_complexity, members_of, read_body
from proxy.errors import BadRequest, LimitExceeded
from proxy.forward.client_response import ClientResponse
from proxy.generate.answers import tokenized
from proxy.generate.sampling import with_model
from proxy.generate.translated import TOKENIZE, tokenize_members
from proxy.headers import HOP
from proxy.models import ModelNames
from proxy.request import client_of, named_model

_TEXTS_MAX: Final = 1024
_AT_ONCE: Final = 4

_Send = Callable[..., Awaitable[OwnAnswer]]


class BatchTokenize:
    def __init__(self, own: OwnRequests) -> None:
        self._own = own

    async def serve(
        self, request: web.BaseRequest, response: ClientResponse, share: Share, names: ModelNames
    ) -> None:
        """Answer a request; the error of one text is the answer to all.

        Raises:
            BadRequest: It has no texts.
            LimitExceeded: It has too many.
            ProxyError: As `read_body` and `ModelNames.resolve` do.
        """
        bodies = await _read(request, share, names)
        send = functools.partial(
            self._own.answer,
            TOKENIZE,
            client=client_of(request),
            requests=0,
            limit_wait_s=share.settings.queue_timeout_s,
            names=names,
            is_from_proxy=HOP in request.headers,
        )
        try:
            results = await _all(send, bodies, response.record.request_id)
        except BatchRefused as refused:
            answer = refused.answer
        else:
            answer = OwnAnswer(HTTPStatus.OK, orjson.dumps({"results": results}))
        await write_whole(response, answer)


async def _all(
    send: _Send, bodies: Sequence[Mapping[str, Any]], request_id: str
) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(index: int, members: Mapping[str, Any]) -> dict[str, Any]:
        async with gate:
            answer = await send(members, request_id=f"{request_id}-{index}")
        if answer.status != HTTPStatus.OK:
            raise BatchRefused(answer)
        return tokenized(orjson.loads(answer.body))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, members)) for index, members in enumerate(bodies)]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # as it is: a task group wraps it up
    return [task.result() for task in tasks]


async def _read(request: web.BaseRequest, share: Share, names: ModelNames) -> list[dict[str, Any]]:
    body = await read_body(request, share)
    await check_complexity(body, share)
    members = await share.run(len(body), lambda: members_of(body))
    model = names.resolve(named_model(with_model(members)) or request.query.get("model"))
    shared = {"model": model.model_info.id}
    return [tokenize_members(shared, text) for text in _texts(members)]


def _texts(members: Mapping[str, Any]) -> list[object]:
    texts = members.get("texts")
    if not isinstance(texts, list):
        raise BadRequest("the member texts must be a list of strings")
    if not texts:
        raise BadRequest("Texts array cannot be empty")
    if len(texts) > _TEXTS_MAX:
        raise LimitExceeded(
            f"texts has {len(texts)} entries, more than {_TEXTS_MAX}; send fewer at once"
        )
    return texts

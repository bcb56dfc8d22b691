"""One answer on its way from an instance to the client: passed, streamed, assembled or refused.

Of a stream, everything up to the first token is looked at; from there on a chunk costs one read,
one write and a count, all in one step of the loop and without waking the request. A client that
reads slowly holds up the instance, not our memory. What the answer tells beyond its text is read
after it was passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.carry.gist import Gist
from proxy.carry.progress import Prelude, Progress, is_start, progress_of
from proxy.carry.refusal import error_of, is_loading, judged, refusal
from proxy.carry.shape import Shape
from proxy.carry.sse import DONE, Garbled, Splitter, data_of, members_of
from proxy.carry.whole import Whole, whole_of
from proxy.carry.writer import Writer
from proxy.engine.exchange import Reply
from proxy.errors import (
    UpstreamFailed,
    UpstreamLoading,
    UpstreamStopped,
    UpstreamUnreached,
    UpstreamUnready,
)
from proxy.headers import JSON, for_client, is_event_stream, is_json
from proxy.line.lease import Lease
from proxy.line.rates import Timings
from proxy.pages import Kind

_ERROR_MAX_BYTES: Final = 1024**2
_ASSEMBLED_MAX_BYTES: Final = 64 * 1024**2
# How a complete stream ends, where it ends in a way that is always the same.
_ENDS: Final = {
    Kind.CHAT: DONE,
    Kind.COMPLETION: DONE,
    Kind.MESSAGES: b"message_stop",
}
_END_BYTES: Final = 64
_UNLEARNED: Final = frozenset({Kind.BATCH, Kind.SPEECH, Kind.LOOK})


class Delivery:
    """One answer; `carry` brings it to the client."""

    def __init__(self, shape: Shape, lease: Lease, reply: Reply, answer: Writer) -> None:
        self._ask = lease.ask
        self._shape = shape
        self._lease = lease
        self._reply = reply
        self._answer = answer
        self._name = lease.upstream.name

    async def carry(self) -> bool:
        """Bring the answer to the client, to its end.

        Returns:
            Whether the client has it. If not, nothing went out: the stream had no text to
            assemble, and the answer must be asked for whole.

        Raises:
            ConnectionError: The client left.
            UpstreamUnreached: Nothing of the answer went out, and nothing more will come.
            UpstreamFailed: The instance broke off, or sent what was not asked for.
            UpstreamTimeout: It said nothing for too long.
        """
        reply, shape = self._reply, self._shape
        try:
            if reply.status >= 400 and self._ask.method != "HEAD":
                await self._refuse()
            elif shape.is_assembled and is_event_stream(reply.headers):
                return await self._assemble()
            elif not shape.is_stream or (shape.is_assembled and is_json(reply.headers)):
                await self._pass()
            elif is_event_stream(reply.headers):
                await self._stream()
            else:
                raise UpstreamFailed(f"{self._name} gave no stream of events where one was asked")
        except Garbled as error:
            raise UpstreamFailed(f"{self._name} gave a broken stream: {error}") from error
        return True

    async def _pass(self) -> None:
        """Pass a body on as it comes."""
        learns = self._reply.status == 200 and self._ask.kind not in _UNLEARNED
        gist = Gist(self._ask.kind, is_stream=False) if learns else None
        await self._answer.begin(self._reply.status, for_client(self._reply.headers))
        chunk = b""
        while not self._reply.is_read:
            if chunk:
                await self._answer.write(chunk)
                self._lease.listen()
                if gist:
                    gist.hear(chunk)
            chunk = await self._reply.read()
            self._lease.hear(chunk)
        await self._finish(gist, chunk)

    async def _stream(self) -> None:
        """Pass a stream on, once its first token is there; its last piece goes with its end."""
        lease, answer, reply = self._lease, self._answer, self._reply
        gist = Gist(self._ask.kind, is_stream=True)
        before, last = b"", await self._prelude(gist)

        def take(chunk: bytes) -> bool:
            nonlocal before
            if not answer.put(chunk):
                return False
            before = chunk
            lease.hear(chunk)
            lease.decoded()
            lease.listen()
            gist.hear(chunk)
            return True

        while not reply.is_read:
            await answer.write(last)
            lease.listen()
            gist.hear(last)
            before = last
            last = await reply.read(take)
            lease.hear(last)
            lease.decoded()
        if not _is_complete(self._ask.kind, before + last):
            await answer.write(last)
            raise UpstreamFailed(f"{self._name} ended its stream before the answer was complete")
        await self._finish(gist, last)

    async def _prelude(self, gist: Gist) -> bytes:
        """Wait for the first token, pass on what comes before it; return what comes with it."""
        prelude = Prelude(hides_progress=self._shape.hides_progress)
        while True:
            chunk = await self._read()
            if not chunk:
                raise self._broken_off()
            self._lease.hear(chunk)
            part = prelude.feed(chunk)
            self._note(prelude.latest)
            if part:
                await self._answer.begin(self._reply.status, for_client(self._reply.headers))
            if prelude.is_over:
                self._answer.record.note_token()
                self._lease.decoded()
                return part
            if part:
                await self._answer.write(part)
                gist.hear(part)
            self._lease.listen()

    async def _assemble(self) -> bool:
        """Answer with the whole that a stream adds up to; return False where that is blank."""
        assembly = whole_of(self._ask.kind)
        splitter = Splitter()
        total_bytes, is_done = 0, _ENDS.get(self._ask.kind) != DONE
        while chunk := await self._read():
            self._lease.hear(chunk)
            total_bytes += len(chunk)
            if total_bytes > _ASSEMBLED_MAX_BYTES:
                raise UpstreamFailed(f"the answer of {self._name} is too long; ask for a stream")
            for event in splitter.feed(chunk):
                is_done = is_done or data_of(event) == DONE
                if not self._added(assembly, event):
                    await self._refuse_late(event)
                    return True
            self._lease.listen()
        if not is_done or not assembly.is_complete:
            raise self._broken_off()
        if not assembly.is_blank:
            await self._give(assembly)
        return not assembly.is_blank

    def _added(self, assembly: Whole, event: bytes) -> bool:
        """Add an event to an answer; return False if it is an error instead."""
        piece = members_of(event)
        if piece is None:
            return True
        if "error" in piece:
            return False
        if progress := progress_of(piece):
            self._note(progress)
        elif not is_start(piece):
            self._answer.record.note_token()
            self._lease.decoded()
        try:
            assembly.add(piece)
        except (LookupError, TypeError, AttributeError) as error:
            raise Garbled(f"an event is no piece of an answer: {error!r}") from error
        return True

    async def _give(self, assembly: Whole) -> None:
        body = orjson.dumps(assembly.whole())
        self._lease.complete()
        headers = CIMultiDict({"Content-Type": JSON, "Content-Length": str(len(body))})
        await self._answer.begin(200, headers)
        await self._answer.finish(body)
        self._learn(Timings.read(assembly.timings()), assembly.message())

    async def _refuse(self) -> None:
        """Answer with the instance's own error."""
        body = b""
        while chunk := await self._reply.read():
            self._lease.hear(chunk)
            body += chunk
            if len(body) > _ERROR_MAX_BYTES:
                raise UpstreamFailed(f"{self._name} gave an error without end")
            self._lease.listen()
        await self._say_no(self._reply.status, for_client(self._reply.headers), body)

    async def _refuse_late(self, event: bytes) -> None:
        """Answer with an error that came where the client sees no stream."""
        body = data_of(event)
        code = (error_of(body) or {}).get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        await self._say_no(status, CIMultiDict({"Content-Type": JSON}), body)

    async def _say_no(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        if is_loading(status, body):
            raise UpstreamLoading(self._name)
        if status == HTTPStatus.SERVICE_UNAVAILABLE and self._lease.upstream.node:
            raise UpstreamUnready(self._name)
        if self._answer.has_begun and error_of(body) is None:
            raise UpstreamFailed(f"{self._name} answered {status} without a reason")
        self._lease.complete()
        status, body = judged(status, body)
        said = refusal(self._ask.kind, self._ask.path, status, body)
        headers["Content-Length"], headers["Content-Type"] = str(len(said)), JSON
        await self._answer.refuse(status, headers, said)

    async def _finish(self, gist: Gist | None, last: bytes) -> None:
        """End an answer that is complete with its last bytes."""
        self._lease.complete()
        await self._answer.finish(last)
        if gist is None:
            self._learn(None, None)
            return
        gist.hear(last)
        gist.close()
        self._learn(gist.timings, gist.reply)

    def _learn(self, timings: Timings | None, reply: Mapping[str, Any] | None) -> None:
        self._answer.record.timings = timings
        self._lease.learn(timings, reply)

    def _note(self, progress: Progress | None) -> None:
        if progress is not None:
            self._lease.progressed(progress.done, progress.total, progress.cached)

    async def _read(self) -> bytes:
        """Read as long as nothing of the answer went out: what breaks can be tried again."""
        try:
            return await self._reply.read()
        except UpstreamStopped:
            raise
        except UpstreamFailed as error:
            raise self._broken_off() from error

    def _broken_off(self) -> UpstreamFailed:
        if self._answer.is_committed:
            return UpstreamFailed(f"{self._name} broke off its answer")
        return UpstreamUnreached(self._name, "broke off its answer before any of it went out")


def _is_complete(kind: Kind, last: bytes) -> bool:
    """Return whether a stream that ended with these bytes ended as an engine ends it.

    Source: llama-server, build 10434: an error event is the last one, without an end mark.
    """
    if _ENDS.get(kind, b"") in last[-_END_BYTES:]:
        return True
    try:
        return "error" in (members_of(last.rstrip().rpartition(b"\n\n")[2]) or {})
    except Garbled:
        return False

"""A fake engine that costs almost nothing: prepared OpenAI responses, sent as fast as possible.

    python -m scripts.bench.overhead_engine --socket PATH.sock --kept-socket PATH.sock --port 0

It prints its TCP port once it listens, and runs until it is killed. Members that every proxy passes
on control the response: `max_tokens` is the number of chunks of a stream, `seed` the microseconds
between two of them, 0 for all at once, and `user` the microseconds until the first of them.

Its first socket behaves as llama-server: the connection is kept after a JSON response and closed
after a stream, without a `Connection: close`. On the other socket and on TCP it is always kept:
direct requests to these cost the least possible.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from functools import partial
from typing import Final, cast

import uvloop

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_IS_STREAM: Final = re.compile(rb'"stream": *true')
_TOKENS: Final = re.compile(rb'"max_tokens": *(\d+)')
_PAUSE: Final = re.compile(rb'"seed": *(\d+)')
_WAIT: Final = re.compile(rb'"user": *"(\d+)"')

_BASE: Final = b'"id":"chatcmpl-1","created":1700000000,"model":"bench","system_fingerprint":"b1"'
_EVENT: Final = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" word"}}],'
    b'"object":"chat.completion.chunk",' + _BASE + b"}\n\n"
)
_LAST: Final = (
    b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],'
    b'"object":"chat.completion.chunk",' + _BASE + b',"usage":{"prompt_tokens":1,'
    b'"completion_tokens":1,"total_tokens":2},"timings":{"cache_n":0,"prompt_n":1,'
    b'"prompt_ms":1.0,"predicted_n":1,"predicted_ms":1.0}}\n\ndata: [DONE]\n\n'
)
_JSON_BODY: Final = (
    b'{"choices":[{"finish_reason":"stop","index":0,"message":{"role":"assistant",'
    b'"content":" word"}}],"object":"chat.completion",' + _BASE + b',"usage":{"prompt_tokens":1,'
    b'"completion_tokens":1,"total_tokens":2}}'
)
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _json_response(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


_JSON_RESPONSE: Final = _json_response(_JSON_BODY)
# A router asks for it before it sends requests.
_MODELS: Final = _json_response(
    b'{"object":"list","data":[{"id":"bench","object":"model","created":1700000000,'
    b'"owned_by":"bench"}]}'
)


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


_EVENT_CHUNK: Final = _chunk(_EVENT)
_END: Final = _chunk(_LAST) + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    def __init__(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._buffer = b""
        self._left = 0
        self._pause_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._timer:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, blank, body = self._buffer.partition(b"\r\n\r\n")
        if not blank or not _is_complete(head, body):
            return
        self._buffer = b""
        if wait := _WAIT.search(body):
            self._timer = self._loop.call_later(int(wait[1]) / 1e6, self._start_stream, body)
        elif _IS_STREAM.search(body):
            self._start_stream(body)
        elif head.startswith(b"GET /v1/models"):
            self._transport.write(_MODELS)
        else:
            self._transport.write(_JSON_RESPONSE)

    def _start_stream(self, body: bytes) -> None:
        tokens, pause = _TOKENS.search(body), _PAUSE.search(body)
        self._left = int(tokens[1]) if tokens else 1
        self._pause_s = int(pause[1]) / 1e6 if pause else 0
        if self._pause_s:
            self._transport.write(_STREAM_HEAD + _EVENT_CHUNK)
            self._left -= 1
            self._due_at_s = self._loop.time()
            self._wait()
        else:
            self._end(_STREAM_HEAD + _EVENT_CHUNK * self._left + _END)

    def _wait(self) -> None:
        # Relative to when the last chunk was due, not sent: all fronts get the same pace.
        self._due_at_s += self._pause_s
        self._timer = self._loop.call_at(self._due_at_s, self._send_chunk)

    def _send_chunk(self) -> None:
        if self._left:
            self._left -= 1
            self._transport.write(_EVENT_CHUNK)
            self._wait()
        else:
            self._end(_END)

    def _end(self, last: bytes) -> None:
        self._transport.write(last)
        if not self._is_kept:
            self._transport.close()


def _is_complete(head: bytes, body: bytes) -> bool:
    if _CHUNKED.search(head):
        return body.endswith(b"0\r\n\r\n")
    length = _LENGTH.search(head)
    return len(body) >= (int(length[1]) if length else 0)


async def serve(socket: str, kept_socket: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    left, kept = partial(Connection, is_kept=False), partial(Connection, is_kept=True)
    async with (
        await loop.create_unix_server(left, socket, backlog=2048),
        await loop.create_unix_server(kept, kept_socket, backlog=2048),
        await loop.create_server(kept, "127.0.0.1", port, backlog=2048) as tcp,
    ):
        print(tcp.sockets[0].getsockname()[1], flush=True)
        await tcp.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--kept-socket", required=True)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.socket, options.kept_socket, options.port))


if __name__ == "__main__":
    main()

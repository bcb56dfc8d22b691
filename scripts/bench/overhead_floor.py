"""A relay that decides nothing, on aiohttp: the least that a proxy built on it costs.

    python -m scripts.bench.overhead_floor --socket PATH.sock --port 8080 --client aiohttp

It parses no JSON, limits nothing and keeps no record. With `--client aiohttp` it reads the engine
with aiohttp's client, with `--client corral` with that of this project. It runs until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable

import uvloop
from aiohttp import ClientSession, UnixConnector, web
from multidict import CIMultiDict

from proxy.server import tune_gc
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, UpstreamResponse
from proxy.upstream.upstream import Upstream

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_FIELDS = ("Content-Type", "Authorization", "Accept", "User-Agent")


def _by_aiohttp(session: ClientSession) -> _Handler:
    async def relay(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        url = f"http://engine{request.path_qs}"
        headers = _passed(request)
        async with session.request(request.method, url, data=body, headers=headers) as upstream:
            response = await _begun(request, upstream.status, upstream.headers.get("Content-Type"))
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    return relay


def _by_corral(socket: str) -> _Handler:
    upstream = Upstream("bench.1", "bench", 1, socket, "", 0, "inner")
    settings = ProxySettings()

    async def relay(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        passed = UpstreamRequest(request.method, request.path, "", _passed(request), body)
        async with UpstreamResponse(upstream, passed, settings) as answer:
            response = await _begun(request, answer.status, answer.headers.get("Content-Type"))
            while chunk := await answer.read():
                await response.write(chunk)
            await response.write_eof()
            return response

    return relay


async def _begun(
    request: web.BaseRequest, status: int, content_type: str | None
) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers={"Content-Type": content_type or ""})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


def _passed(request: web.BaseRequest) -> CIMultiDict[str]:
    fields = request.headers
    return CIMultiDict({name: fields[name] for name in _FIELDS if name in fields})


async def serve(socket: str, port: int, client: str) -> None:
    connector = UnixConnector(socket, limit=0, force_close=True)
    async with ClientSession(connector=connector, auto_decompress=False) as session:
        relay = _by_aiohttp(session) if client == "aiohttp" else _by_corral(socket)
        server = web.Server(relay, access_log=None, keepalive_timeout=75)
        tune_gc()
        await asyncio.get_running_loop().create_server(server, "127.0.0.1", port, backlog=2048)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--client", choices=("aiohttp", "corral"), required=True)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.socket, options.port, options.client))


if __name__ == "__main__":
    main()

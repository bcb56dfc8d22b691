"""The proxy in front of one engine, as the daemon runs it, without a supervisor.

    python -m scripts.bench.overhead_front --socket PATH.sock --port 8080

It prints its URL once it serves, and runs until it is killed. `overhead --against` runs this file
of other commits too, so its options must not change.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

import uvloop

from proxy.app import App, Backend
from proxy.endpoints.prometheus import Metrics
from proxy.observe.record import discard
from proxy.request.models import ModelInfo, ModelNames, OnLoad, do_nothing_on_load
from proxy.router.router import Router
from proxy.server import Server, tune_gc
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Upstream

# More than any measurement needs at once: no request waits in the queue.
_SLOTS = 2048


class OneModel:
    """A `proxy.request.models.ModelLoader` whose only model is loaded."""

    _names = ModelNames([ModelInfo("bench", (), "loaded", 1_700_000_000, 4096, _SLOTS)])

    def models(self) -> Sequence[ModelInfo]:
        return self._names.model_infos

    def names(self) -> ModelNames:
        return self._names

    async def ensure_ready(self, model: str, on_load: OnLoad = do_nothing_on_load) -> None:
        """It is always loaded."""


async def serve(socket: str, port: int) -> None:
    settings = ProxySettings(listen=f"127.0.0.1:{port}")
    router = Router(settings)
    router.admit(Upstream("bench.1", "bench", _SLOTS, socket, "", 0, "inner"))
    metrics = Metrics(settings, discard)
    server = Server(App(router, settings, metrics, Backend(loader=OneModel())))
    tune_gc()
    await server.start()
    print(server.url, flush=True)
    await router.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.socket, options.port))


if __name__ == "__main__":
    main()

"""A whole proxy in the test's own process, with fake instances behind it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import Any, Literal

import aiohttp
from support.upstream import Fake, Script, say_ok

from proxy.app import App, Backend
from proxy.cache.prompt_rules import PromptRules
from proxy.cache.shared_prefixes import SharedPrefix
from proxy.dashboard.host import (
    BenchJob,
    BenchWish,
    Download,
    HostEvent,
    HostInstance,
    HostMemory,
    HostModel,
    HostSlotFile,
    PinnedModel,
    StartOptions,
    Verb,
)
from proxy.endpoints.prometheus import Metrics
from proxy.endpoints.slot_files import SlotFileHost
from proxy.errors import NotFound, ProxyError
from proxy.nodes.gather import NodeAnswer, Question
from proxy.nodes.nodes import NodeStats
from proxy.observe.past import ForgottenConversation, HistoryQuery, RatesQuery, StoredRequest
from proxy.request.models import (
    GpuUse,
    ModelDetails,
    ModelInfo,
    ModelNames,
    OnLoad,
    PrefillResult,
    Progress,
    Residence,
    do_nothing_on_load,
)
from proxy.router.lease import SlotUse
from proxy.router.router import Router
from proxy.server import Server
from proxy.settings import ProxySettings

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}


def model_info(
    name: str,
    state: Literal["loaded", "loading", "unloaded", "failed"] = "loaded",
    reason: str | None = None,
) -> ModelInfo:
    return ModelInfo(name, (f"vendor/{name}",), state, 1_700_000_000, 2048, 2, reason)


class FakeLoader:
    """Knows the models in `model_infos`; makes one ready by admitting the instances in `asleep`."""

    def __init__(self, router: Router) -> None:
        self.model_infos = [model_info("chat")]
        self.default: str | None = None
        self.prompt_rules: PromptRules | None = None
        self.asleep: list[Fake] = []
        self.failure: BaseException | None = None
        self.began = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.router = router

    def models(self) -> Sequence[ModelInfo]:
        if self.failure and not isinstance(self.failure, ProxyError):
            raise self.failure
        return self.model_infos

    def names(self) -> ModelNames:
        return ModelNames(self.models(), self.default, self.prompt_rules)

    async def ensure_ready(self, model: str, on_load: OnLoad = do_nothing_on_load) -> None:
        self.began.set()
        on_load()
        await self.may_go_on.wait()
        if self.failure:
            raise self.failure
        for fake in self.asleep:
            self.router.admit(fake.upstream(model))


class FakeReader:
    """Has read every prompt, once it may; records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.left = asyncio.Event()
        self.learning: set[str] = set()
        self.learned: list[tuple[str, SharedPrefix]] = []

    def learns(self, model: str, /) -> bool:
        return model in self.learning

    def learn(self, model: str, opening: SharedPrefix, /) -> None:
        self.learned.append((model, opening))

    async def warm(self, model: str, body: Mapping[str, Any], /) -> Sequence[PrefillResult]:
        self.asked.append((model, body))
        try:
            await self.may_go_on.wait()
        finally:
            self.left.set()
        return [PrefillResult(f"{model}.0", 30, 12)]


class FakeEngine:
    """An engine with the share of each model on GPUs that a test sets (`EngineReader`)."""

    def __init__(self) -> None:
        self.uses: dict[str, GpuUse] = {}

    def gpu_use(self, model: str, /) -> GpuUse:
        return self.uses.get(model, GpuUse())

    async def runtime(self) -> Mapping[str, object]:
        return {"format": "gguf", "version": "fake"}


class FakeControl:
    """Records its calls (`ModelControl`); a test says when something changes."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, str]] = []
        self.failure: ProxyError | None = None
        self.listening: list[asyncio.Event] = []

    def load(self, model: str, /) -> None:
        if self.failure:
            raise self.failure
        self.commands.append(("load", model))

    async def load_for_others(self, model: str, /) -> None:
        if self.failure:
            raise self.failure
        self.commands.append(("load for others", model))

    def unload(self, model: str, /) -> None:
        self.commands.append(("unload", model))

    @contextmanager
    def changes(self) -> Iterator[asyncio.Event]:
        changed = asyncio.Event()
        self.listening.append(changed)
        try:
            yield changed
        finally:
            self.listening.remove(changed)

    def change(self) -> None:
        for listener in self.listening:
            listener.set()


class FakeOllamaHost:
    """Knows a model's details, downloads in two steps, notes the rest (`OllamaHost`)."""

    def __init__(self) -> None:
        self.known: dict[str, ModelDetails] = {}
        self.residences: dict[str, Residence] = {}
        self.kept: list[tuple[str, float]] = []
        self.deleted: list[str] = []
        self.failure: ProxyError | None = None
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.left = asyncio.Event()

    async def details(self, models: Sequence[str], /) -> Mapping[str, ModelDetails]:
        return {name: self.known[name] for name in models if name in self.known}

    def residence(self, model: str, /) -> Residence:
        return self.residences.get(model, Residence())

    def keep_alive(self, model: str, seconds: float, /) -> None:
        self.kept.append((model, seconds))

    async def pull(self, name: str, /) -> AsyncGenerator[Progress, None]:
        try:
            yield Progress("pulling manifest")
            yield Progress("pulling", f"{name}.gguf", 100, 40)
            await self.may_go_on.wait()
            if self.failure:
                raise self.failure
            yield Progress("pulling", f"{name}.gguf", 100, 100)
        finally:
            self.left.set()

    async def delete(self, model: str, /) -> None:
        self.deleted.append(model)


class FakeMachineModels:
    """Records plans and starts (`MachineModels`)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, StartOptions]] = []

    async def list_models(self) -> Mapping[str, object]:
        return {"models": [], "profiles": [], "notes": []}

    async def plan(self, model: str, options: StartOptions, /) -> Mapping[str, object]:
        self.calls.append(("plan", model, options))
        return {}

    async def start(self, model: str, options: StartOptions, /, *, save: bool) -> None:
        self.calls.append(("save" if save else "start", model, options))


class FakeBench:
    """Measures nothing (`BenchRunner`)."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def job(self) -> BenchJob | None:
        return BenchJob("chat", ("low-latency", "low-memory"))

    async def start(self, wish: BenchWish, /) -> None:
        self.calls.append(wish)

    def cancel(self) -> None:
        self.calls.append("cancel")

    async def report(self) -> str:
        return "<p>report</p>"


class FakeSettingsFile:
    """Saves nothing (`SettingsFile`)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    async def read(self) -> Mapping[str, object]:
        self.calls.append(("read",))
        return {}

    async def check(self, text: str, /) -> Mapping[str, object]:
        self.calls.append(("check", text))
        return {}

    async def save(self, text: str, etag: str, /) -> Mapping[str, object]:
        self.calls.append(("save", text, etag))
        return {}


class FakeHubHost:
    """Downloads nothing (`Hub`)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    async def search(self, words: str, /) -> Sequence[Mapping[str, object]]:
        self.calls.append(("search", words))
        return []

    async def fit(self, name: str, /) -> Mapping[str, object]:
        self.calls.append(("fit", name))
        return {}

    def pinned(self) -> Sequence[PinnedModel]:
        return [PinnedModel("small", "A small model", 1024, "MIT")]

    def downloads(self) -> Sequence[Download]:
        return [Download("org/model-GGUF:Q8_0")]

    def download(self, name: str, /) -> None:
        self.calls.append(("download", name))

    def cancel(self, name: str, /) -> None:
        self.calls.append(("cancel", name))


class FakeDashboardHost:
    """A daemon with one instance, a log and an event stream that a test fills (`DashboardHost`)."""

    vendor = Path(__file__).parent.parent.parent / "vendor"
    version = "1.2.3"

    def __init__(self) -> None:
        self.machine_models = FakeMachineModels()
        self.bench = FakeBench()
        self.settings_file = FakeSettingsFile()
        self.hub = FakeHubHost()
        self.known = {"chat": HostModel("default")}
        self.processes = [HostInstance("chat.1", "chat", "ready", since_s=0.0, pid=42)]
        self.commands: list[tuple[str, str]] = []
        self.answers: list[NodeAnswer] = []
        self.log: list[str] = []
        self.takes: list[Callable[[HostEvent], None]] = []

    def models(self) -> Mapping[str, HostModel]:
        return self.known

    def instances(self) -> Sequence[HostInstance]:
        return self.processes

    def memory(self) -> Mapping[str, HostMemory]:
        return {"host": HostMemory(total=100, weights=40, caches=20, buffers=5, others=10)}

    def devices(self) -> Sequence[Mapping[str, object]]:
        return [{"id": "GPU-0", "name": "a card", "load": 0.43}]

    def nodes(self) -> Sequence[NodeStats]:
        return [NodeStats(answer.node, "http://n", "up", None) for answer in self.answers]

    async def ask_nodes(
        self, question: Question, query: Mapping[str, str], /
    ) -> Sequence[NodeAnswer]:
        assert (question, query) == ("machine", {})
        return self.answers

    async def caches(self) -> object:
        return {"models": []}

    def observe(self, take: Callable[[HostEvent], None], /) -> None:
        self.takes.append(take)

    def command(self, verb: Verb, model: str, /) -> None:
        self.commands.append((verb, model))

    def slot_files(self) -> Sequence[HostSlotFile]:
        return ()

    async def forget(self, file: str, /) -> ForgottenConversation:
        raise NotFound(f"no saved conversation begins with {file!r}")

    def log_sources(self) -> Sequence[str]:
        return ["daemon"]

    async def log_tail(self, source: str, lines: int, /) -> Sequence[str]:
        return self._last(source, lines)

    def log_lines(self, source: str, lines: int, /) -> AsyncGenerator[str, None]:
        return self._follow(self._last(source, lines))

    def _last(self, source: str, lines: int) -> Sequence[str]:
        if source != "daemon":
            raise NotFound("there is no such log")
        return self.log[-lines:]

    async def _follow(self, lines: Sequence[str]) -> AsyncGenerator[str, None]:
        for line in lines:
            yield line
        await asyncio.Event().wait()

    async def clients(
        self,
        model: str | None,
        url: str,  # noqa: ARG002
        /,
        *,
        needs_key: bool,  # noqa: ARG002
    ) -> Mapping[str, object]:
        found = {"models": ["chat"], "model": model or "chat", "key_variable": "CORRAL_API_KEY"}
        return {**found, "clients": []}


class FakeHistory:
    """Has the past that a test sets (`RequestHistory`), the latest first."""

    def __init__(self) -> None:
        self.stored: list[StoredRequest] = []
        self.asked: list[HistoryQuery] = []

    async def requests(self, query: HistoryQuery, /) -> Sequence[StoredRequest]:
        self.asked.append(query)
        return [
            entry
            for entry in self.stored
            if query.request_id in {None, entry["id"]} and query.client in {None, entry["client"]}
        ][: query.limit]

    async def rates(self, query: RatesQuery, /) -> Mapping[str, Sequence[float | None]]:
        return {"queued": [0.0] * query.count}

    async def cache_rates(
        self, query: RatesQuery, /
    ) -> Mapping[str, Mapping[str, Sequence[float]]]:
        return {"chat": {"slot": [1.0] * query.count, "saved_s": [2.5] * query.count}}


class FakeConversations:
    """Knows the conversations of the requests that a test says (`Conversations`)."""

    def __init__(self) -> None:
        self.known: set[object] = set()

    async def forget_of(self, request: StoredRequest, /) -> ForgottenConversation | None:
        if request["id"] not in self.known:
            return None
        self.known.discard(request["id"])
        return ForgottenConversation(2, 1, in_use=False)


class KeepAlives:
    """Records how long requests want their models to stay, and their times."""

    def __init__(self) -> None:
        self.given: list[tuple[str, float]] = []
        self.uses: list[SlotUse] = []

    def listen(self, router: Router) -> None:
        router.signals.keep_alive.connect(lambda *given: self.given.append(given))
        router.signals.slots_freed.connect(lambda _, use: self.uses.append(use))


class ProxyHarness:
    """A running proxy and the parts of it that tests need."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.emitted: list[tuple[str, dict[str, Any]]] = []
        self.settings = ProxySettings(
            listen="127.0.0.1:0",
            max_body_bytes=100_000,
            connect_timeout_s=2,
            upstream_read_timeout_s=20,
        )
        self.metrics = Metrics(self.settings, self._hear)
        self.keep_alives = KeepAlives()
        self.is_on_battery = False
        self.router = Router(emit=self.metrics.emit, is_on_battery=lambda: self.is_on_battery)
        self.keep_alives.listen(self.router)
        self.loader = FakeLoader(self.router)
        self.reader = FakeReader()
        self.engine = FakeEngine()
        self.control = FakeControl()
        self.ollama = FakeOllamaHost()
        self.history = FakeHistory()
        self.conversations = FakeConversations()
        self.dashboard = FakeDashboardHost()
        self.slot_files: SlotFileHost | None = None
        self.sockets: Sequence[socket.socket] = ()
        self.idle_timeout_s = 75.0
        self._directory = directory
        self._stack = stack
        self._tend()

    async def open(self, **changes: Any) -> None:
        """Start the server; `changes` are settings."""
        self.settings = self.settings.model_copy(update=changes)  # unchecked
        if not self.router.instances():
            self.router = self.loader.router = Router(
                self.settings,
                self.metrics.emit,
                clock=asyncio.get_running_loop().time,
                is_on_battery=lambda: self.is_on_battery,
            )
            self.keep_alives.listen(self.router)
            self._tend()
        self.server = self.build(self.settings)
        await self.server.start()
        self._stack.push_async_callback(self.server.close)
        self.http = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                self.server.url,
                timeout=aiohttp.ClientTimeout(total=120),  # it ends tests that hang alone
                cookie_jar=aiohttp.CookieJar(unsafe=True),  # for an address
            )
        )

    def build(self, settings: ProxySettings) -> Server:
        """Return a server that is not yet started."""
        backend = Backend(
            loader=self.loader,
            warmer=self.reader,
            engine=self.engine,
            control=self.control,
            ollama=self.ollama,
            history=self.history,
            dashboard=self.dashboard,
            slot_files=self.slot_files,
            conversations=self.conversations,
        )
        app = App(self.router, settings, self.metrics, backend)
        self.sessions = app.sessions
        self.core = app.core
        self.tls = app.tls
        self.capture = app.capture
        return Server(app, self.sockets, idle_timeout_s=self.idle_timeout_s)

    async def fake(
        self, script: Script = say_ok, name: str = "chat.1", *, is_admitted: bool = True
    ) -> Fake:
        """Start an instance of the model chat."""
        fake = Fake(name, self._directory / name, script)
        await fake.start()
        self._stack.push_async_callback(fake.stop)
        if is_admitted:
            self.router.admit(fake.upstream())
        return fake

    def ask(
        self, path: str = "/v1/chat/completions", **members: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a chat request; enter the returned context to get the response."""
        return self.http.post(path, json={**CHAT, **members})

    async def send(self) -> None:
        """Send a chat request and do not care for the answer."""
        async with self.ask():
            pass

    @asynccontextmanager
    async def raw(
        self, port: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection to speak HTTP on by hand."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.server.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    @asynccontextmanager
    async def stream(self, begins_with: bytes) -> AsyncIterator[asyncio.StreamReader]:
        """Ask for a stream by hand; go on once its first bytes are there.

        aiohttp's client loses received bytes when a body breaks off; a bare connection does not.
        """
        async with self.raw() as (reader, writer):
            writer.write(
                b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n"
                b'{"stream":true}'
            )
            await reader.readuntil(begins_with + b"\r\n")
            yield reader

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of every event of this name that was emitted."""
        return [fields for emitted, fields in self.emitted if emitted == name]

    def _tend(self) -> None:
        # No task group: a fixture is entered and left in different tasks.
        running = asyncio.get_running_loop().create_task(self.router.run())

        async def end() -> None:
            running.cancel()
            await asyncio.wait([running])

        self._stack.push_async_callback(end)

    def _hear(self, name: str, fields: Mapping[str, Any]) -> None:
        self.emitted.append((name, {**fields}))


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


async def until(claim: Callable[[], bool]) -> None:
    """Wait until a claim holds that nothing announces; the test's own patience ends the wait."""
    while not claim():  # noqa: ASYNC110 (a few turns of the loop)
        await asyncio.sleep(0)

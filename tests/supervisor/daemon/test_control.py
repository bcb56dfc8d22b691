"""Both ends of the control socket, with a small service between them."""

import asyncio
import http.client
import inspect
import json
import socket
import stat
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support import top_samples
from support.corral_cli import PATIENCE_S
from support.slot_files import manifest

from proxy.observe.past import RequestStats
from supervisor.daemon import control_server
from supervisor.daemon.cache_status import saved_status
from supervisor.daemon.control_client import (
    OPERATIONS,
    Answer,
    Client,
    Message,
    Operation,
    Stream,
    StreamEnded,
)
from supervisor.daemon.control_messages import (
    BalanceStatus,
    CachesStatus,
    CanariesStatus,
    DaemonStatus,
    ForgottenSlots,
    JoinedHost,
    MovedLayers,
    ReloadReport,
    SavedSlot,
    TrialStatus,
    WarmedInstance,
)
from supervisor.daemon.desktop import STARTER, DesktopHosts, backend_hosts
from supervisor.daemon.model_status import reload_report, saved_slot
from supervisor.daemon.operations import DaemonService, warm_prompt
from supervisor.engine.exit_cause import FailureCause
from supervisor.errors import (
    CorralError,
    DaemonBusy,
    NoSuchConversation,
    NoSuchModel,
    NoSuchRequest,
    NotRunning,
    SettingsInvalid,
    StartFailed,
)
from supervisor.events import EventStream
from supervisor.fleet.launches import ReplicaId
from supervisor.fleet.reload import Difference, ReloadResult
from supervisor.fleet.replace import ReplicaFailure
from supervisor.slot_store.manifest import Manifest

CHAT = ReplicaId("chat", 0)
KILLED = FailureCause("killed", "it was killed", "see dmesg", permanent=False)
FAILURE = ReplicaFailure(CHAT, KILLED, log_path=None, stays=True)
RELOADED = ReloadResult(Difference((), (), (CHAT,), ()), ("a note",), (FAILURE,))

MOVED = MovedLayers(
    model="chat",
    before={"a": 3, "b": 3},
    after={"a": 5, "b": 1},
    reason="b is slow",
    estimated_speedup=1.5,
    file="/data/layers/chat.json",
)

NO_CANARIES = CanariesStatus(running=[], ended=[])


class Service:
    """Knows one model, `chat`, which is ready at the third event."""

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self.emit = events.emit
        self.commands: list[tuple[str, list[str]]] = []
        self.refreshed = 0
        self.ending = False
        self.is_cut = False
        self.prompt: dict[str, Any] = {}
        self.warmed: list[str] = []
        self.canary: tuple[str, str, float, float | None, float] | None = None
        self.reloading: asyncio.Future[ReloadReport | CorralError] | None = None
        self.hosts: DesktopHosts | None = None

    async def status(self) -> DaemonStatus:
        self.refreshed += 1
        return self.current_status()

    def current_status(self) -> DaemonStatus:
        return replace(top_samples.STATUS, stopping=self.ending)

    async def caches(self) -> CachesStatus:
        return saved_status([manifest("a", model="chat")])

    def forget_slots(
        self, conversation: str | None, **_: str | None
    ) -> asyncio.Future[ForgottenSlots | CorralError]:
        done: asyncio.Future[ForgottenSlots | CorralError] = asyncio.Future()
        unknown = NoSuchConversation("no saved conversation begins with 'b'")
        found = ForgottenSlots(
            slots=[saved_slot(manifest("a"))],
            emptied=1,
            in_use=False,
        )
        done.set_result(unknown if conversation == "b" else found)
        return done

    def trials(self) -> list[TrialStatus]:
        return []

    def requests(self) -> list[RequestStats]:
        return []

    async def records(self, question: str, asked: object) -> object:
        return [question, asked]

    def cancel_request(self, request_id: str) -> None:
        raise NoSuchRequest(f"no request in flight has the id {request_id}")

    @asynccontextmanager
    async def capture(
        self, model: str, requests: int | None, **_: float
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        if model != "chat":
            raise NoSuchModel(f"no model {model}")
        yield self._lines(requests)

    async def _lines(self, requests: int | None) -> AsyncGenerator[bytes, None]:
        yield f"{requests}\n".encode()

    def stop_capture(self) -> None:
        self.is_cut = True

    def dashboard_link(self) -> str:
        return "http://127.0.0.1:8080/corral/#token=secret"

    def balances(self) -> list[BalanceStatus]:
        return []

    def balance(self, model: str, *, undo: bool) -> asyncio.Future[MovedLayers | CorralError]:
        if model == "even":
            return self._over("balance", [model], SettingsInvalid("no layer is to be moved"))
        return self._over("undo" if undo else "balance", [model], MOVED)

    def canaries(self) -> CanariesStatus:
        return NO_CANARIES

    def start_canary(
        self, model: str, engine: str, share: float, limit_s: float | None, margin: float
    ) -> asyncio.Future[CanariesStatus | CorralError]:
        self.canary = (model, engine, share, limit_s, margin)
        failed = StartFailed("chat.1 did not start") if share == 0.5 else None
        return self._over("canary", [model], failed or NO_CANARIES)

    def end_canary(self, model: str, verb: str) -> asyncio.Future[CanariesStatus | CorralError]:
        return self._over(verb, [model], NO_CANARIES)

    def command(self, verb: str, models: Sequence[str]) -> Callable[[], bool]:
        if set(models) - {"chat"}:
            raise NoSuchModel("no model is named 'x'", hint="models there are: chat")
        self.commands.append((verb, list(models)))
        answers = iter([False, False, False, True])
        for value in (0.1, 0.5, 1.0):
            fields = {"instance": "chat.0", "model": "chat", "run": 1, "stage": "text_model"}
            self._events.emit("instance.load_progress", value=value, **fields)
        return lambda: next(answers)

    def reload(self, *, dry_run: bool) -> asyncio.Future[ReloadReport | CorralError]:
        if self.reloading:
            raise DaemonBusy("a reload is under way")
        self.reloading = asyncio.get_running_loop().create_future()
        if self.is_cut:
            self.reloading.cancel()
        elif dry_run:
            self.reloading.set_result(reload_report(RELOADED))
        else:
            self.reloading.set_result(SettingsInvalid("corral.toml is not TOML", hint="see it"))
            self._events.emit("settings.rejected", reason="corral.toml is not TOML")
        return self.reloading

    def save_slots(self, models: Sequence[str]) -> asyncio.Future[list[SavedSlot]]:
        return self._over("save", models, [saved_slot(manifest())])

    def warm(
        self, model: str, body: dict[str, Any]
    ) -> asyncio.Future[list[WarmedInstance] | CorralError]:
        self.prompt = dict(warm_prompt(model, body).body)
        self.warmed.append(model)
        if model == "down":
            return self._over("warm", [model], StartFailed("no instance is ready"))
        return self._over("warm", [model], [WarmedInstance("chat.0", 7, 3)])

    def _over(self, verb: str, models: Sequence[str], found: Any) -> asyncio.Future[Any]:
        self.commands.append((verb, list(models)))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.is_cut:
            future.cancel()
        else:
            future.set_result(found)
        return future

    def add_models(self, models: dict[str, Any]) -> asyncio.Future[ReloadReport | CorralError]:
        return self._over("add", list(models), reload_report(RELOADED))

    @contextmanager
    def host(self) -> Iterator[tuple[JoinedHost, Callable[[], bool]]]:
        hosts = backend_hosts(self.hosts)
        with hosts.join() as host:
            joined = JoinedHost(host, "/run/desktop.key", self.current_status())
            yield joined, lambda: not hosts.has(host)

    def leave(self, host: str) -> None:
        assert self.hosts
        self.hosts.leave(int(host))

    def events(self) -> Callable[[], bool]:
        return lambda: False

    def shutdown(self) -> Callable[[], bool]:
        self.ending = True
        self._events.emit("daemon.stopping", reason="requested over the control socket")
        return lambda: False


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


@pytest.fixture
async def service(path: Path) -> AsyncIterator[Service]:
    events = EventStream()
    service = Service(events)
    async with control_server.serve(cast("DaemonService", service), events, path):
        yield service


async def outcome(call: Callable[[], Stream[Answer]]) -> tuple[list[Message], Answer]:
    """Return the messages of a stream, and its answer."""

    def read_all() -> tuple[list[Message], Answer]:
        stream, messages = call(), []
        while True:
            try:
                messages.append(next(stream))
            except StopIteration as end:
                return messages, end.value

    return await asyncio.to_thread(read_all)


async def answer(call: Callable[[], Stream[Answer]]) -> Answer:
    return (await outcome(call))[1]


async def test_the_socket_is_private_and_removed_afterwards(path: Path) -> None:
    events = EventStream()
    async with control_server.serve(cast("DaemonService", Service(events)), events, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_status_has_fresh_figures(service: Service, path: Path) -> None:
    status = await asyncio.to_thread(Client(path).status)
    assert status.url == "http://127.0.0.1:8080"
    assert service.refreshed == 1


async def test_a_command_streams_progress_until_it_is_over(service: Service, path: Path) -> None:
    messages, status = await outcome(lambda: Client(path).command("start", ["chat"]))
    assert service.commands == [("start", ["chat"])]
    progress = [line["progress"]["fraction"] for line in messages if "progress" in line]
    assert progress == [0.1, 0.5, 1.0]
    assert status.pid == 1


async def test_an_unknown_model_is_an_error_with_its_hint(service: Service, path: Path) -> None:
    with pytest.raises(NoSuchModel) as caught:
        await answer(lambda: Client(path).command("stop", ["x"]))
    assert caught.value.hint == "models there are: chat"
    assert service.commands == []


async def test_the_lines_of_a_capture_pass_as_they_are(service: Service, path: Path) -> None:
    client = Client(path)
    assert await asyncio.to_thread(list, client.capture("chat", 5.0, 1024**2, 7)) == [b"7\n"]
    for model, requests, kind in (("x", 7, NoSuchModel), ("chat", 0, SettingsInvalid)):
        with pytest.raises(kind):
            await asyncio.to_thread(list, client.capture(model, 5.0, 1024**2, requests))
    await asyncio.to_thread(client.stop_capture)
    assert service.is_cut


async def test_a_dry_run_reports_the_changes_of_a_reload(service: Service, path: Path) -> None:
    messages, report = await outcome(lambda: Client(path).reload(dry_run=True))
    assert messages == []
    assert (report.changed, report.kept, report.notes) == (["chat.0"], [], ["a note"])
    (failure,) = report.failures
    assert failure["code"] == "killed"
    assert failure["message"] == "chat.0: it was killed; it keeps its old settings"


async def test_added_models_are_given_by_their_tables(service: Service, path: Path) -> None:
    report = await answer(lambda: Client(path).add_models({"chat": {"path": "/chat.gguf"}}))
    assert service.commands == [("add", ["chat"])]
    assert report.changed == ["chat.0"]
    assert (await post(path, "/v1/models", b'{"models": ["chat"]}'))[0] == 409


async def test_a_rejected_reload_raises_the_error_of_its_class(
    service: Service, path: Path
) -> None:
    with pytest.raises(SettingsInvalid, match="not TOML"):
        await answer(lambda: Client(path).reload(dry_run=False))
    with pytest.raises(DaemonBusy, match="under way"):
        await answer(lambda: Client(path).reload(dry_run=False))


async def test_a_reload_that_a_shutdown_ends_is_an_error(service: Service, path: Path) -> None:
    service.is_cut = True
    with pytest.raises(DaemonBusy, match="exited before"):
        await answer(lambda: Client(path).reload(dry_run=False))


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"dry_run": 1}'])
async def test_a_reload_without_dry_run_in_its_body_is_rejected(
    service: Service, path: Path, body: bytes
) -> None:
    status, said = await post(path, "/v1/reload", body)
    assert status == 409
    assert SettingsInvalid.code.encode() in said
    assert service.reloading is None


async def test_a_save_lists_the_saved_slots_without_their_text(
    service: Service, path: Path
) -> None:
    _, body = await post(path, "/v1/slots/save", b'{"models": ["chat"]}')
    assert service.commands == [("save", ["chat"])]
    assert json.loads(body) == {
        "slots": [
            {
                "name": "a",
                "model": "chat",
                "replica": 0,
                "tokens": 300,
                "size_bytes": 1000,
                "saved_at": "2026-01-01T12:00:00+00:00",
                "encrypted": False,
                "adapters": [],
            }
        ]
    }
    (saved,) = await answer(lambda: Client(path).save_slots(["chat"]))
    assert vars(saved) == vars(saved_slot(manifest("a")))


@pytest.mark.usefixtures("service")
async def test_the_tiers_of_each_model_are_listed(path: Path) -> None:
    found = await asyncio.to_thread(Client(path).caches)
    (one,) = found.models
    assert one.model == "chat"
    assert [tier.tier for tier in one.tiers] == ["slot", "host_cache", "disk"]


@pytest.mark.usefixtures("service")
async def test_a_conversation_is_forgotten_by_the_daemon(path: Path) -> None:
    found = await asyncio.to_thread(Client(path).forget_slots, None, "a", None)
    assert (found.slots[0].name, found.emptied) == ("a", 1)
    with pytest.raises(NoSuchConversation, match="begins with"):
        await asyncio.to_thread(Client(path).forget_slots, None, "b", None)
    for body in (b"[]", b'{"model": null}', b'{"model": 1, "conversation": "a", "request": null}'):
        status, said = await post(path, "/v1/slots/forget", body)
        assert (status, SettingsInvalid.code.encode() in said) == (409, True)


async def test_a_prompt_is_prefilled_by_every_instance(service: Service, path: Path) -> None:
    (warmed,) = await answer(lambda: Client(path).warm("chat", {"prompt": "be kind"}))
    assert (warmed.instance, warmed.tokens, warmed.cached) == ("chat.0", 7, 3)
    assert service.prompt["messages"][0] == {"role": "system", "content": "be kind"}
    request = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    await answer(lambda: Client(path).warm("qwen/tiny:q4", request))
    assert service.warmed == ["chat", "qwen/tiny:q4"]
    assert service.prompt == {"messages": [{"role": "user", "content": "x"}]}


async def test_a_prompt_that_no_instance_prefilled_is_an_error(
    service: Service, path: Path
) -> None:
    with pytest.raises(StartFailed, match="no instance"):
        await answer(lambda: Client(path).warm("down", {"prompt": "be kind"}))


async def test_a_command_that_a_shutdown_ends_is_an_error(service: Service, path: Path) -> None:
    service.is_cut = True
    with pytest.raises(DaemonBusy, match="exited before"):
        await answer(lambda: Client(path).save_slots([]))


async def test_a_slow_command_sends_waiting_messages(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(events := EventStream())
    never: asyncio.Future[list[Manifest]] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(service, "save_slots", lambda **_: never)

    def first() -> Message:
        return next(Client(path).save_slots([]))

    served = control_server.serve(cast("DaemonService", service), events, path, 0.01)
    async with served:
        assert await asyncio.to_thread(first) == {"waiting": 0.01}
        never.cancel()


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"prompt": 1}', b'{"messages": "x"}'])
async def test_an_invalid_prompt_is_rejected(service: Service, path: Path, body: bytes) -> None:
    status, said = await post(path, "/v1/models/chat/warm", body)
    assert status == 409
    assert SettingsInvalid.code.encode() in said
    assert service.commands == []


async def test_a_shutdown_begins_and_streams_its_event(service: Service, path: Path) -> None:
    def first() -> Message:
        return next(Client(path).shutdown())

    line = await asyncio.to_thread(first)
    assert line["event"]["name"] == "daemon.stopping"
    assert service.ending


async def test_the_stream_of_a_host_ends_when_it_leaves(service: Service, path: Path) -> None:
    service.hosts = DesktopHosts(service.emit, lambda: None)

    def leave() -> tuple[Message, list[Message]]:
        messages = Client(path).host()
        first = next(messages)
        Client(path).leave(first["host"]["host"])
        return first, list(messages)

    first, rest = await asyncio.to_thread(leave)
    assert first["host"]["api_key_file"] == "/run/desktop.key"
    assert [entry["event"]["name"] for entry in rest] == ["host.joined", "host.left"]
    assert not service.hosts.is_empty  # the command that started the daemon


async def test_a_host_that_disconnects_has_left(service: Service, path: Path) -> None:
    left = asyncio.Event()
    service.hosts = DesktopHosts(service.emit, left.set)
    messages = Client(path).host()
    await asyncio.to_thread(next, messages)
    service.hosts.leave(STARTER)
    await asyncio.to_thread(messages.close)
    async with asyncio.timeout(PATIENCE_S):
        await left.wait()


async def test_a_daemon_that_is_no_desktop_backend_takes_no_host(
    service: Service, path: Path
) -> None:
    with pytest.raises(DaemonBusy, match="not a desktop backend"):
        await answer(Client(path).host)


async def post(path: Path, target: str, body: bytes, *, method: str = "POST") -> tuple[int, bytes]:
    def call() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request(method, target, body)
        response = connection.getresponse()
        found = response.status, response.read()
        connection.close()
        return found

    return await asyncio.to_thread(call)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"models": 1}', b'{"models": [1]}'])
async def test_an_invalid_body_is_rejected(service: Service, path: Path, body: bytes) -> None:
    status, said = await post(path, "/v1/start", body)
    assert status == 409
    assert SettingsInvalid.code.encode() in said
    assert service.commands == []


async def test_get_changes_nothing(service: Service, path: Path) -> None:
    assert (await post(path, "/v1/start", b'{"models": []}', method="GET"))[0] == 405
    assert service.commands == []


def test_without_a_daemon_the_client_raises_not_running(path: Path) -> None:
    with pytest.raises(NotRunning):
        Client(path).status()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with pytest.raises(NotRunning):
        Client(path).status()


def test_a_socket_that_does_not_speak_http_is_a_busy_daemon(path: Path) -> None:
    listener = socket.create_server(str(path), family=socket.AF_UNIX)

    def hang_up() -> None:
        connection, _ = listener.accept()
        connection.close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    with pytest.raises(DaemonBusy, match="does not answer"):
        Client(path).status()
    thread.join()
    listener.close()


def test_a_stream_of_a_killed_daemon_ends_without_its_answer(path: Path) -> None:
    listener = socket.create_server(str(path), family=socket.AF_UNIX)
    line = b'{"waiting": 5.0}\n'

    def die() -> None:
        connection, _ = listener.accept()
        connection.recv(1024)
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"%x\r\n%b\r\n" % (len(line), line))
        connection.close()

    thread = threading.Thread(target=die)
    thread.start()
    messages = Client(path).events()
    assert next(messages) == {"waiting": 5.0}
    with pytest.raises(StreamEnded):
        next(messages)
    thread.join()
    listener.close()


async def test_a_canary_is_started_promoted_and_withdrawn(service: Service, path: Path) -> None:
    client = Client(path)
    assert vars(await asyncio.to_thread(client.canaries)) == vars(NO_CANARIES)
    wanted = ("chat", "/opt/new/llama-server", 0.1, 600.0, 0.2)
    assert vars(await answer(lambda: client.start_canary(*wanted))) == vars(NO_CANARIES)
    assert service.canary == wanted
    await answer(lambda: client.end_canary("chat", "promote"))
    await answer(lambda: client.end_canary("chat", "withdraw"))
    assert [verb for verb, _ in service.commands[-2:]] == ["promote", "withdraw"]
    with pytest.raises(StartFailed):
        await answer(lambda: client.start_canary("chat", "b11000", 0.5, 600.0, 0.2))


@pytest.mark.parametrize(
    "change", [{"share": 0}, {"share": "a"}, {"limit_s": 0}, {"margin": 2}, {"engine": ""}]
)
async def test_a_canary_that_cannot_be_meant_is_refused(
    service: Service, path: Path, change: dict[str, object]
) -> None:
    body = {"engine": "b11000", "share": 0.1, "limit_s": None, "margin": 0.2, **change}
    status, said = await post(path, "/v1/models/chat/canary", json.dumps(body).encode())
    assert (status, SettingsInvalid.code.encode() in said) == (409, True)
    assert next(iter(change)).encode() in said
    assert service.commands == []


async def test_layers_are_moved_and_told(service: Service, path: Path) -> None:
    """seed 000"""
    assert await asyncio.to_thread(Client(path).balances) == []
    assert vars(await answer(lambda: Client(path).balance("chat"))) == vars(MOVED)
    assert vars(await answer(lambda: Client(path).balance("chat", undo=True))) == vars(MOVED)
    assert service.commands == [("balance", ["chat"]), ("undo", ["chat"])]
    with pytest.raises(SettingsInvalid, match="no layer is to be moved"):
        await answer(lambda: Client(path).balance("even"))


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_is_a_method_of_both_ends_with_the_same_parameters(
    operation: Operation,
) -> None:
    found = inspect.signature(getattr(DaemonService, operation.name)).parameters
    assert [*found] == [*inspect.signature(operation.stub).parameters]

"""The operations of the control socket: `Client` declares each once, and sends it.

The decorator of a method gives its HTTP method, path and answer; the server makes its routes from
`OPERATIONS`. A parameter is a part of the path or a member of the JSON body; `body` is the whole
body.

Uses `http.client` and reads answers itself: `corral status` takes 0.1 s of processor time, httpx
would add 0.10 s and pydantic 0.08 s.
"""

# The methods of `Client` have no body: the decorators send.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import http.client
import importlib
import inspect
import json
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, get_args, get_type_hints
from urllib.parse import quote

from supervisor.daemon import control_messages as messages
from supervisor.errors import CorralError, DaemonBusy, NotRunning, from_json
from supervisor.system.paths import check_owner

if TYPE_CHECKING:
    from proxy.nodes.gather import NodeAnswer, Question
    from proxy.observe.past import RequestStats

# A stream sends "waiting" every 5 s; after this long without a byte the daemon hangs.
_READ_TIMEOUT_S: Final = 20.0
_MESSAGE_MAX_BYTES: Final = 64 * 1024**2

Answer = TypeVar("Answer")
Stub = TypeVar("Stub", bound=Callable[..., Any])
Sends = Literal["nothing", "events", "progress", "waiting", "lines"]
# A line of a stream has one member: `event` ({name, level, at, fields}), `progress` ({instance,
# fraction}: of a model's weights that are loaded, 0 to 1), `waiting` (seconds without a message) or
# `host` (JoinedHost). The iterator returns the answer, in the last line; `error` is raised.
Message = Mapping[str, Any]
Stream = Generator[Message, None, Answer]


@dataclass(frozen=True, slots=True)
class Operation:
    """How a method of `Client` crosses the socket.

    `member` of the response is the answer; the whole response if it is empty. `sends`: the messages
    before the answer: all `events`, events and load `progress`, only `waiting`, or raw `lines`.
    `module` has the answer's type, and is imported when one is read; empty for one imported here.
    """

    name: str
    method: str
    path: str
    member: str
    sends: Sends
    stub: Callable[..., Any]
    module: str

    def answer(self) -> Any:
        names = vars(importlib.import_module(self.module)) if self.module else None
        hint = get_type_hints(self.stub, names)["return"]
        return hint if self.sends == "nothing" else get_args(hint)[-1]


OPERATIONS: Final[dict[str, Operation]] = {}


def _operation(
    method: str, path: str, member: str = "", sends: Sends = "nothing", module: str = ""
) -> Callable[[Stub], Stub]:
    def declare(stub: Stub) -> Stub:
        operation = Operation(stub.__name__, method, path, member, sends, stub, module)
        OPERATIONS[operation.name] = operation

        @functools.wraps(stub)
        def send(client: Client, *args: object, **members: object) -> Any:
            bound = inspect.signature(stub).bind(client, *args, **members)
            bound.apply_defaults()
            _, *arguments = bound.arguments.items()
            return client.send(operation, dict(arguments))

        return cast("Stub", send)

    return declare


class Client:
    """The daemon behind a control socket.

    Every method raises NotRunning if no daemon listens, and DaemonBusy if it does not answer.
    Streams also raise the error of a failed command, such as NoSuchModel.
    """

    def __init__(self, control_socket: Path) -> None:
        self._socket = control_socket

    @_operation("GET", "/v1/status")
    def status(self) -> messages.DaemonStatus:
        """Return the status of the daemon, its models and instances."""

    @_operation("GET", "/v1/trials", "trials")
    def trials(self) -> list[messages.TrialStatus]:
        """Return the figures of each model's trial."""

    @_operation("GET", "/v1/slots")
    def caches(self) -> messages.CachesStatus:
        """Return the places of the prompts of each model."""

    @_operation("GET", "/v1/requests", "requests", module="proxy.observe.past")
    def requests(self) -> list[RequestStats]:
        """Return the requests in flight, oldest first."""

    @_operation("GET", "/v1/machine")
    def machine(self) -> dict[str, Any]:
        """Return the figures of this machine, as `GET /corral/v1/machine` does."""

    @_operation("POST", "/v1/nodes/{question}", "answers", module="proxy.nodes.gather")
    def ask_nodes(self, question: Question, query: Mapping[str, str]) -> list[NodeAnswer]:
        """Ask all nodes for `machine`, `caches`, `requests` or `usage`, within 2 s."""

    @_operation("POST", "/v1/requests/{request_id}/cancel")
    def cancel_request(self, request_id: str) -> None:
        """End a request with an error; raises NoSuchRequest if none in flight has the id."""

    @_operation("POST", "/v1/records/{question}")
    def records(self, question: str, asked: Any) -> Any:
        """Answer one of `records.store.QUESTIONS`; raises HistoryUnavailable."""

    @_operation("POST", "/v1/dashboard/link", "url")
    def dashboard_link(self) -> str:
        """Return a link that signs in one browser; raises SettingsInvalid without a dashboard."""

    @_operation("GET", "/v1/events", "done", "events")
    def events(self) -> Stream[messages.DaemonStatus]:
        """Send events until the client disconnects."""

    @_operation("POST", "/v1/{verb:start|stop|restart|load|unload}", "done", "progress")
    def command(self, verb: str, models: Sequence[str]) -> Stream[messages.DaemonStatus]:
        """Start, stop, restart, load or unload models, all if none is named; until that is done."""

    @_operation("POST", "/v1/devices/yield", "done", "progress")
    def yield_devices(
        self, duration_s: float | None, *, end: bool = False
    ) -> Stream[messages.DaemonStatus]:
        """Stop models that use devices, until that is done; `end`: load them again.

        `duration_s`: after which it ends by itself; None if only a command ends it.
        """

    @_operation("POST", "/v1/reload", "reloaded", "progress")
    def reload(self, *, dry_run: bool) -> Stream[messages.ReloadReport]:
        """Reload the settings, until they are applied or rejected."""

    @_operation("POST", "/v1/models", "reloaded", "waiting")
    def add_models(self, models: Mapping[str, Any]) -> Stream[messages.ReloadReport]:
        """Serve further models until the daemon ends, by tables `[models.NAME]`; loads none."""

    @_operation("POST", "/v1/models/change", "reloaded", "progress")
    def change_models(
        self, models: Sequence[str], settings: Mapping[str, Any]
    ) -> Stream[messages.ReloadReport]:
        """Apply settings of `[models.NAME]` to these models until the daemon ends; starts none."""

    @_operation("POST", "/v1/slots/save", "slots", "waiting")
    def save_slots(self, models: Sequence[str]) -> Stream[list[messages.SavedSlot]]:
        """Save the idle slots of models, all if none is named; return all saved slots."""

    @_operation("POST", "/v1/slots/forget")
    def forget_slots(
        self, model: str | None, conversation: str | None, request: str | None
    ) -> messages.ForgottenSlots:
        """Forget the conversation of a file, or of a request, or all of a model, or all.

        At most one parameter is not None. `conversation` is the beginning of a file name, `request`
        the id of a request. Raises NoSuchConversation.
        """

    @_operation("POST", "/v1/models/{model}/warm", "warmed", "waiting")
    def warm(self, model: str, body: Mapping[str, Any]) -> Stream[list[messages.WarmedInstance]]:
        """Prefill a chat request, or `{"prompt": text}`, on each instance of a model."""

    @_operation("GET", "/v1/balance", "balances")
    def balances(self) -> list[messages.BalanceStatus]:
        """Return the workers of each split model, and suggested moves."""

    @_operation("POST", "/v1/models/{model}/balance", "moved", "waiting")
    def balance(self, model: str, *, undo: bool = False) -> Stream[messages.MovedLayers]:
        """Move the layers of a model as suggested; `undo` moves them back."""

    @_operation("GET", "/v1/canaries")
    def canaries(self) -> messages.CanariesStatus:
        """Return the running and ended canaries of all models."""

    @_operation("POST", "/v1/models/{model}/canary", "canaries", "progress")
    def start_canary(
        self, model: str, engine: str, share: float, limit_s: float | None, margin: float
    ) -> Stream[messages.CanariesStatus]:
        """Start a canary, until it serves. `limit_s`: None if only a command ends it."""

    @_operation("POST", "/v1/models/{model}/canary/{verb:promote|withdraw}", "canaries", "progress")
    def end_canary(self, model: str, verb: str) -> Stream[messages.CanariesStatus]:
        """End a canary (`verb`: promote or withdraw), until that is done."""

    @_operation("POST", "/v1/capture", sends="lines")
    def capture(
        self, model: str, duration_s: float, size_bytes: int, requests: int | None
    ) -> Iterator[bytes]:
        """Send the lines of a capture, and empty lines during pauses; a disconnect ends it."""

    @_operation("POST", "/v1/capture/stop")
    def stop_capture(self) -> None:
        """End the running capture."""

    @_operation("POST", "/v1/hosts", "done", "events")
    def host(self) -> Stream[messages.DaemonStatus]:
        """Be a desktop host until the disconnect; `host` comes first. Raises DaemonStopping."""

    @_operation("POST", r"/v1/hosts/{host:\d{1,9}}/leave")
    def leave(self, host: int) -> None:
        """Leave; the stream of the host then ends. If no host is left, the daemon ends first."""

    @_operation("POST", "/v1/hosts/keep")
    def keep(self) -> None:
        """Outlive the desktop hosts, until a shutdown; DaemonBusy if it is no desktop backend."""

    @_operation("POST", "/v1/shutdown", "done", "progress")
    def shutdown(self) -> Stream[messages.DaemonStatus]:
        """Drain and stop, until no engine runs; the stream may break when the daemon exits."""

    def send(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Carry out an operation; parameters of the path are taken out of `arguments`."""
        parts = operation.path.split("/")
        path = "/".join(
            quote(str(arguments.pop(_parameter(part))), safe="") if _parameter(part) else part
            for part in parts
        )
        body = arguments.get("body", arguments)
        content = None if operation.method == "GET" else json.dumps(body, default=asdict)
        response = _response(self._socket, operation.method, path, content)
        if operation.sends == "lines":
            return _lines(response)
        if operation.sends != "nothing":
            return _messages(response, operation)
        with response as answered:
            found = json.load(answered)
        return messages.read(
            operation.answer(), found[operation.member] if operation.member else found
        )


def _parameter(part: str) -> str:
    """Return the parameter that a part of a path is, such as `host` of `{host:…}`, or nothing."""
    return part[1:-1].partition(":")[0] if part.startswith("{") else ""


Response = AbstractContextManager[http.client.HTTPResponse]


def _lines(response: Response) -> Iterator[bytes]:
    with response as answered:
        while line := answered.readline(_MESSAGE_MAX_BYTES):
            yield line


class StreamEnded(DaemonBusy):
    """A stream ended before its answer, because the daemon was killed or exited."""


def _messages(response: Response, operation: Operation) -> Stream[Any]:
    with response as answered:
        while line := answered.readline(_MESSAGE_MAX_BYTES):
            message = json.loads(line)
            if "error" in message:
                raise from_json(message["error"])
            if operation.member in message:
                return messages.read(operation.answer(), message[operation.member])
            yield message
    ended = messages.daemon_exited_error()
    raise StreamEnded(ended.message, hint=ended.hint)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_READ_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@contextmanager
def _response(
    path: Path, method: str, target: str, content: str | None
) -> Iterator[http.client.HTTPResponse]:
    """Send a request; reading the response inside the block may raise the same errors.

    A socket in another user's directory gets no request: its answers cannot be trusted.
    """
    check_owner(path.parent)
    connection = _UnixConnection(path)
    try:
        connection.request(method, target, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise _error(response)
        yield response
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise NotRunning("the daemon is not running", hint="corral start starts it") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DaemonBusy(
            f"the daemon does not answer on {path}: {error}", hint="corral logs shows its log"
        ) from error
    finally:
        connection.close()


def _error(response: http.client.HTTPResponse) -> CorralError:
    try:
        return from_json(json.load(response)["error"])
    except (ValueError, KeyError, TypeError):
        return DaemonBusy(f"the daemon answered with status {response.status}")

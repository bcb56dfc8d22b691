"""Sends requests to the daemon over its control socket.

Uses `http.client`, not httpx: `corral status` takes 0.22 s of processor time, and httpx would add
0.10 s.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

from supervisor.daemon.control_messages import (
    BalanceStatus,
    CachesStatus,
    CanariesStatus,
    DaemonStatus,
    ForgetRequest,
    ForgottenSlots,
    RequestStatus,
    StreamMessage,
    TrialStatus,
)
from supervisor.errors import CorralError, DaemonBusy, NotRunning, from_json
from supervisor.system.paths import check_owner

# A stream sends "waiting" every 5 s; after this long without a byte the daemon hangs.
_READ_TIMEOUT_S: Final = 20.0
_MESSAGE_MAX_BYTES: Final = 64 * 1024**2


class Client:
    """The daemon behind a control socket.

    Every method raises NotRunning if no daemon listens, and DaemonBusy if it does not answer.
    Iterators of messages also raise the error of a failed command, such as NoSuchModel.
    """

    def __init__(self, control_socket: Path) -> None:
        self._socket = control_socket

    def status(self) -> DaemonStatus:
        with _response(self._socket, "GET", "/v1/status") as response:
            return cast("DaemonStatus", json.load(response))

    def trials(self) -> list[TrialStatus]:
        with _response(self._socket, "GET", "/v1/trials") as response:
            return cast("list[TrialStatus]", json.load(response)["trials"])

    def requests(self) -> list[RequestStatus]:
        with _response(self._socket, "GET", "/v1/requests") as response:
            return cast("list[RequestStatus]", json.load(response)["requests"])

    def cancel_request(self, request_id: str) -> None:
        """End a request with an error; raises NoSuchRequest if none in flight has the id."""
        with _response(self._socket, "POST", f"/v1/requests/{quote(request_id, safe='')}/cancel"):
            pass

    def dashboard_link(self) -> str:
        """Return a link that signs in one browser; raises SettingsInvalid without a dashboard."""
        with _response(self._socket, "POST", "/v1/dashboard/link") as response:
            return str(json.load(response)["url"])

    def capture(self, body: Mapping[str, Any]) -> Iterator[bytes]:
        """Capture requests until a limit; yield raw lines, and empty lines during pauses."""
        with _response(self._socket, "POST", "/v1/capture", body) as response:
            while line := response.readline(_MESSAGE_MAX_BYTES):
                yield line

    def stop_capture(self) -> None:
        with _response(self._socket, "POST", "/v1/capture/stop", {}) as response:
            response.read()

    def records(self, question: str, asked: Any) -> Any:
        """Answer one of `records.store.QUESTIONS`; raises HistoryUnavailable."""
        body = asdict(asked) if is_dataclass(asked) and not isinstance(asked, type) else asked
        path = f"/v1/records/{question}"
        with _response(self._socket, "POST", path, {"asked": body}) as response:
            return json.load(response)

    def canaries(self) -> CanariesStatus:
        with _response(self._socket, "GET", "/v1/canaries") as response:
            return cast("CanariesStatus", json.load(response))

    def start_canary(self, model: str, body: Mapping[str, Any]) -> Iterator[StreamMessage]:
        return self._messages("POST", f"/v1/models/{quote(model, safe='')}/canary", body)

    def end_canary(self, model: str, *, is_promoted: bool) -> Iterator[StreamMessage]:
        verb = "promote" if is_promoted else "withdraw"
        return self._messages("POST", f"/v1/models/{quote(model, safe='')}/canary/{verb}", {})

    def balances(self) -> list[BalanceStatus]:
        with _response(self._socket, "GET", "/v1/balance") as response:
            return cast("list[BalanceStatus]", json.load(response)["balances"])

    def balance(self, model: str, *, undo: bool = False) -> Iterator[StreamMessage]:
        """Move the layers of a model as suggested; `undo` moves them back."""
        return self._messages("POST", f"/v1/models/{quote(model, safe='')}/balance", {"undo": undo})

    def command(self, verb: str, models: Sequence[str]) -> Iterator[StreamMessage]:
        """Start, stop, restart, load or unload models; no models means all."""
        return self._messages("POST", f"/v1/{verb}", {"models": list(models)})

    def reload(self, *, dry_run: bool) -> Iterator[StreamMessage]:
        return self._messages("POST", "/v1/reload", {"dry_run": dry_run})

    def add_models(self, tables: Mapping[str, Any]) -> Iterator[StreamMessage]:
        """Serve further models until the daemon ends, by tables `[models.NAME]`; loads none."""
        return self._messages("POST", "/v1/models", {"models": tables})

    def caches(self) -> CachesStatus:
        with _response(self._socket, "GET", "/v1/slots") as response:
            return cast("CachesStatus", json.load(response))

    def save_slots(self, models: Sequence[str]) -> Iterator[StreamMessage]:
        return self._messages("POST", "/v1/slots/save", {"models": list(models)})

    def forget_slots(self, asked: ForgetRequest) -> ForgottenSlots:
        """Forget conversations; raises NoSuchConversation."""
        with _response(self._socket, "POST", "/v1/slots/forget", asked) as response:
            return cast("ForgottenSlots", json.load(response))

    def warm(self, model: str, body: Mapping[str, Any]) -> Iterator[StreamMessage]:
        return self._messages("POST", f"/v1/models/{quote(model, safe='')}/warm", body)

    def shutdown(self) -> Iterator[StreamMessage]:
        """Drain and stop the daemon; the stream breaks when it exits."""
        messages = self._messages("POST", "/v1/shutdown", {})
        yield next(messages)
        with suppress(DaemonBusy):
            yield from messages

    def host(self) -> Iterator[StreamMessage]:
        """Be a host until the iterator is closed; `host` comes first. Raises DaemonStopping."""
        return self._messages("POST", "/v1/hosts", {})

    def leave(self, host: int) -> None:
        """Leave; the stream of `host` then ends. If no host is left, the daemon ends first."""
        with _response(self._socket, "POST", f"/v1/hosts/{host}/leave", {}) as response:
            response.read()

    def events(self) -> Iterator[StreamMessage]:
        return self._messages("GET", "/v1/events", None)

    def _messages(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[StreamMessage]:
        with _response(self._socket, method, path, body) as response:
            while line := response.readline(_MESSAGE_MAX_BYTES):
                message = cast("StreamMessage", json.loads(line))
                if "error" in message:
                    raise from_json(message["error"])
                yield message


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
    path: Path, method: str, target: str, body: Mapping[str, Any] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Send a request; reading the response inside the block may raise the same errors.

    A socket in another user's directory gets no request: its answers cannot be trusted.
    """
    check_owner(path.parent)
    connection = _UnixConnection(path)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, target, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise _error(response)
        yield response
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise NotRunning("the daemon is not running", hint="corral start starts it") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DaemonBusy(
            f"the daemon does not answer on {path}: {error}", hint="corral logs shows what it does"
        ) from error
    finally:
        connection.close()


def _error(response: http.client.HTTPResponse) -> CorralError:
    try:
        return from_json(json.load(response)["error"])
    except (ValueError, KeyError, TypeError):
        return DaemonBusy(f"the daemon answered with status {response.status}")

"""Talks to the daemon over its control socket.

Uses the standard library's HTTP client alone: `corral status` must answer in a quarter of a
second, and importing httpx would take most of it.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

from supervisor.control.messages import DaemonStatus, StreamMessage
from supervisor.errors import CorralError, DaemonBusy, NotRunning, from_json
from supervisor.host.paths import check_owner

# A stream of lines says "waiting" every 5 s, so silence of this length is a mute daemon.
_SILENCE_MAX_S: Final = 20.0


class Client:
    """The daemon that owns a runtime directory."""

    def __init__(self, control_socket: Path) -> None:
        self._socket = control_socket

    def status(self) -> DaemonStatus:
        """Return what runs.

        Raises:
            NotRunning: No daemon listens.
            DaemonBusy: It does not answer.
        """
        with _answer(self._socket, "GET", "/v1/status") as response:
            return cast("DaemonStatus", json.load(response))

    def command(self, verb: str, models: Sequence[str]) -> Iterator[StreamMessage]:
        """Tell the daemon to start, stop or restart models (none: all), line by line to the end.

        Raises:
            NotRunning, DaemonBusy: As `status`.
            NoSuchModel: A name is not configured.
        """
        yield from self._lines("POST", f"/v1/{verb}", {"models": list(models)})

    def reload(self, *, dry_run: bool) -> Iterator[StreamMessage]:
        """Tell the daemon to reload its settings, line by line to the end.

        Raises:
            NotRunning: As `status`.
            DaemonBusy: As `status`, or a reload is under way.
            CorralError: The settings cannot be used; nothing was changed.
        """
        yield from self._lines("POST", "/v1/reload", {"dry_run": dry_run})

    def save_slots(self, models: Sequence[str]) -> Iterator[StreamMessage]:
        """Have the daemon save what idle slots hold (no names: of all), line by line to the end.

        Raises:
            NotRunning, DaemonBusy: As `status`.
            NoSuchModel: A name is not configured.
        """
        yield from self._lines("POST", "/v1/slots/save", {"models": list(models)})

    def warm(self, model: str, body: Mapping[str, Any]) -> Iterator[StreamMessage]:
        """Have a model's instances read the prompt of a chat request, line by line to the end.

        Raises:
            NotRunning, DaemonBusy: As `status`.
            NoSuchModel: The name is not configured.
            CorralError: An instance did not read it, or none is ready.
        """
        yield from self._lines("POST", f"/v1/models/{quote(model)}/warm", body)

    def shutdown(self) -> Iterator[StreamMessage]:
        """Tell the daemon to drain and end; the stream breaks off when it does."""
        begun = self._lines("POST", "/v1/shutdown", {})
        yield next(begun)
        with suppress(DaemonBusy):
            yield from begun

    def events(self) -> Iterator[StreamMessage]:
        """Yield what happens from now on."""
        yield from self._lines("GET", "/v1/events", None)

    def _lines(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[StreamMessage]:
        with _answer(self._socket, method, path, body) as response:
            for text in response:
                line = cast("StreamMessage", json.loads(text))
                if "error" in line:
                    raise from_json(line["error"])
                yield line


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_SILENCE_MAX_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@contextmanager
def _answer(
    path: Path, method: str, target: str, body: Mapping[str, Any] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Ask, and hold the answer open for the length of the block, whose reading may fail too.

    A socket in another user's directory is not asked: it could answer anything.
    """
    check_owner(path.parent)
    connection = _UnixConnection(path)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, target, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise _refusal(response)
        yield response
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise NotRunning("the daemon is not running", hint="corral start starts it") from error
    except (OSError, http.client.HTTPException) as error:
        raise DaemonBusy(
            f"the daemon does not answer on {path}: {error}", hint="corral logs tells what it does"
        ) from error
    finally:
        connection.close()


def _refusal(response: http.client.HTTPResponse) -> CorralError:
    try:
        return from_json(json.load(response)["error"])
    except (ValueError, KeyError, TypeError):
        return DaemonBusy(f"the daemon answered with status {response.status}")

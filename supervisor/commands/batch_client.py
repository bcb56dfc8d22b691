"""Requests of `corral batch` to the proxy of the running daemon."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import httpx

from proxy.errors import Draining
from supervisor.commands.batch_tls import pinned, raise_if_refused
from supervisor.control.client import Client
from supervisor.errors import AccessDenied, CorralError, DaemonBusy
from supervisor.host.files import open_regular
from supervisor.host.paths import directories

KEY_VARIABLE: Final = "CORRAL_API_KEY"
_TIMEOUT_S: Final = 60.0
_LIST_MAX: Final = 100

Object = Mapping[str, Any]


class BatchClient:
    """Every method raises CorralError: DaemonBusy where the proxy does not answer."""

    def __init__(self) -> None:
        """Find the daemon. Raises NotRunning."""
        self._http = connected()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def reconnect(self) -> None:
        """Find the daemon again, which may have another address. Raises NotRunning."""
        found = connected()
        self._http.close()
        self._http = found

    def upload(self, path: Path) -> Object:
        with open_regular(path) as file:
            form = {"file": (path.name, file, "application/jsonl")}
            return self._json("POST", "/v1/files", data={"purpose": "batch"}, files=form)

    def create(self, file_id: str, endpoint: str) -> Object:
        members = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        return self._json("POST", "/v1/batches", json=members)

    def get(self, batch_id: str) -> Object:
        return self._json("GET", f"/v1/batches/{_safe(batch_id)}")

    def cancel(self, batch_id: str) -> Object:
        return self._json("POST", f"/v1/batches/{_safe(batch_id)}/cancel")

    def list(self) -> list[Object]:
        """The newest batches."""
        found: list[Object] = self._json("GET", "/v1/batches", params={"limit": _LIST_MAX})["data"]
        return found

    def download(self, file_id: str, path: Path) -> None:
        """Write a file; it is there whole or not at all."""
        with _answers(), self._http.stream("GET", f"/v1/files/{file_id}/content") as response:
            if response.is_error:
                response.read()
                raise _failure(response)
            _write(path, response.iter_bytes())

    def _json(self, method: str, path: str, **content: Any) -> Object:
        with _answers():
            response = self._http.request(method, path, **content)
            if response.is_error:
                raise _failure(response)
            found: Object = response.json()
            return found


def connected() -> httpx.Client:
    """Find the daemon. Raises NotRunning."""
    status = Client(directories().control_socket).status()
    cert = status["tls_cert"]
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # No proxy of the environment: the daemon is on this machine.
    return httpx.Client(
        base_url=status["url"],
        headers=headers,
        timeout=_TIMEOUT_S,
        trust_env=False,
        verify=pinned(Path(cert)) if cert else True,
    )


@contextmanager
def _answers() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise_if_refused(error)
        raise DaemonBusy(
            f"the daemon does not answer: {str(error) or type(error).__name__}",
            hint="corral status shows whether it runs; its batches go on when it runs again",
        ) from error


def _failure(response: httpx.Response) -> CorralError:
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, code = f"the daemon answered with status {response.status_code}", None
    if code == Draining.code:
        return DaemonBusy(message)
    is_key = response.status_code == httpx.codes.UNAUTHORIZED
    return CorralError(message, hint=f"set {KEY_VARIABLE} to an API key" if is_key else None)


def _safe(batch_id: str) -> str:
    if not batch_id.replace("_", "").replace("-", "").isalnum() or not batch_id.isascii():
        raise CorralError(f"{batch_id!r} is no id of a batch", hint="corral batch list shows them")
    return batch_id


def _write(path: Path, pieces: Iterator[bytes]) -> None:
    try:
        descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
        Path(draft).replace(path)
    except OSError as error:
        Path(draft).unlink(missing_ok=True)
        raise _unwritable(path, error) from error
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _unwritable(path: Path, error: OSError) -> AccessDenied:
    return AccessDenied(f"cannot write {path}: {error.strerror}")

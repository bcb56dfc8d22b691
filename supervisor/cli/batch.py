"""Implements `corral batch run|list|show|cancel`: files of requests for the daemon."""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx

from proxy.errors import Draining
from supervisor import errors
from supervisor.daemon.control_client import Client
from supervisor.errors import access_denied
from supervisor.output import CommandResult, ProgressMeter, colored, duration, table, write
from supervisor.system.files import check_new, open_regular, write_atomic
from supervisor.system.paths import directories

CERT_VARIABLE: Final = "CORRAL_CLIENT_CERT"
_END: Final = "-----END CERTIFICATE-----"


def pinned_context(cert: Path) -> ssl.SSLContext:
    """Trust only the daemon's own certificate, for any host name.

    The control socket gave the path of the file, so neither a CA nor the name 127.0.0.1 is needed.
    Raises AccessDenied, or SettingsInvalid if it or the client certificate cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    with access_denied(f"the daemon's certificate {cert} cannot be read"):
        text = cert.read_text("ascii", "ignore")
    try:
        context.load_verify_locations(cadata=text.partition(_END)[0] + _END + "\n")
    except (ssl.SSLError, ValueError) as error:
        raise errors.SettingsInvalid(
            f"the daemon's certificate {cert} cannot be used: {error}"
        ) from error
    if own := os.environ.get(CERT_VARIABLE):
        try:
            context.load_cert_chain(own, password="")
        except OSError as error:  # also an ssl.SSLError
            raise errors.SettingsInvalid(
                f"{CERT_VARIABLE}: {own} cannot be used: {error.strerror or error}",
                hint="name a PEM file with a client certificate and its key, without a passphrase",
            ) from error
    return context


KEY_VARIABLE: Final = "CORRAL_API_KEY"
_TIMEOUT_S: Final = 60.0
_LIST_MAX: Final = 100

Object = Mapping[str, Any]


def ask(method: str, path: str, **content: Any) -> Any:
    """Send a request to the daemon's batch API, and return its answer.

    Raises CorralError, NotRunning, or DaemonBusy if the proxy does not answer.
    """
    with connect() as http, translate_http_errors():
        response = http.request(method, path, **content)
        raise_refusal(response)
        return response.json()


def _download(file_id: str, path: Path) -> None:
    """Write a file atomically; raises as `ask`."""
    page = f"/v1/files/{file_id}/content"
    with connect() as http, translate_http_errors(), http.stream("GET", page) as response:
        raise_refusal(response)
        with access_denied(f"cannot write {path}"):
            write_atomic(path, response.iter_bytes())


def connect(api_key: str | None = None) -> httpx.Client:
    """Return a client of the running daemon's proxy, with the key of the environment if none."""
    status = Client(directories().control_socket).status()
    key = api_key or os.environ.get(KEY_VARIABLE)
    # Ignore proxies from the environment: the daemon is on this machine.
    return httpx.Client(
        base_url=status.url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=_TIMEOUT_S,
        trust_env=False,
        # A context for TLS takes 20 ms.
        verify=pinned_context(Path(status.tls_cert))
        if status.tls_cert
        else status.url.startswith("https:"),
    )


_CONTINUE: Final = "corral status shows whether it runs; its batches continue when it runs again"


@contextmanager
def translate_http_errors(hint: str = _CONTINUE) -> Iterator[None]:
    """Raise DaemonBusy, or AccessDenied if TLS has failed, not only the connection."""
    try:
        yield
    except httpx.HTTPError as error:
        if "[SSL" in str(error) or "CERTIFICATE" in str(error):
            raise errors.AccessDenied(
                f"no TLS connection with the daemon: {error}",
                hint=f"if it demands a client certificate, set {CERT_VARIABLE} to a PEM file with "
                "one and its key; corral config check shows whether its own has expired",
            ) from error
        what = str(error) or type(error).__name__
        raise errors.DaemonBusy(f"the daemon does not answer: {what}", hint=hint) from error


def error_of(response: httpx.Response) -> tuple[str, str | None]:
    """Return the message and the code of a refusal."""
    try:
        error = response.json()["error"]
        return str(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"the daemon answered with status {response.status_code}", None


def raise_refusal(response: httpx.Response) -> None:
    if response.is_error:
        response.read()
        message, code = error_of(response)
        if code == Draining.code:
            raise errors.DaemonBusy(message)
        is_key = response.status_code == httpx.codes.UNAUTHORIZED
        hint = f"set {KEY_VARIABLE} to an API key" if is_key else None
        raise errors.CorralError(message, hint=hint)


def _page(batch_id: str) -> str:
    if not batch_id.replace("_", "").replace("-", "").isalnum() or not batch_id.isascii():
        raise errors.CorralError(
            f"{batch_id!r} is not a batch id", hint="corral batch list shows them"
        )
    return f"/v1/batches/{batch_id}"


_ACTIVE: Final = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_POLL_FIRST_S: Final = 0.1
_POLL_MAX_S: Final = 2.0


def left_s(new: int, missing: int, elapsed_s: float) -> float | None:
    """Return the remaining seconds, from the lines done in a time; None before a line is done."""
    return elapsed_s * missing / new if new > 0 else None


def wait(batch: Object, meter: ProgressMeter, *, restart_max_s: float = 120.0) -> Object:
    """Return a batch at its end; raises if the daemon has not answered for `restart_max_s`.

    During a restart the daemon drains for up to half a minute, and may replay its database.
    """
    began, began_s, pause_s = _count_done(batch), time.monotonic(), _POLL_FIRST_S
    answered_s, detail = began_s, _detail(batch, began, began_s)
    with meter:
        while batch["status"] in _ACTIVE:
            total = batch["request_counts"]["total"]
            meter.show(batch["id"], _count_done(batch) / total if total else 0.0, detail)
            time.sleep(pause_s)
            try:
                batch = ask("GET", _page(batch["id"]))
            except (errors.DaemonBusy, errors.NotRunning):
                if time.monotonic() - answered_s >= restart_max_s:
                    raise
                detail, pause_s = "waits until the daemon runs again", _POLL_FIRST_S
            else:
                answered_s, detail = time.monotonic(), _detail(batch, began, began_s)
                pause_s = min(1.5 * pause_s, _POLL_MAX_S)
    return batch


def _detail(batch: Object, began: int, began_s: float) -> str:
    if reason := batch.get("pause_reason"):
        return f"waits: {reason}"
    if batch["status"] != "in_progress":
        return str(batch["status"])
    counts, done = batch["request_counts"], _count_done(batch)
    rest_s = left_s(done - began, counts["total"] - done, time.monotonic() - began_s)
    parts = [f"{done} of {counts['total']} lines"]
    parts += [f"{counts['failed']} failed"] if counts["failed"] else []
    parts += [f"{duration(rest_s)} left"] if rest_s is not None else []
    return " · ".join(parts)


def _count_done(batch: Object) -> int:
    counts = batch["request_counts"]
    return int(counts["completed"] + counts["failed"])


_HEAD: Final = ("BATCH", "STATUS", "DONE", "FAILED", "LINES", "CREATED", "ENDPOINT")
# Time for a second Ctrl-C, which cancels.
_SECOND_S: Final = 2.0
_LINE_MAX_BYTES: Final = 64 * 1024**2
_EXAMPLE: Final = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
    '"body": {"model": "NAME", "messages": [{"role": "user", "content": "Hello"}]}}'
)


def run(file: Path, output: Path | None) -> CommandResult:
    """Compute a file; exit code 0 only if every line was computed without an error."""
    endpoint = _endpoint(file)
    files = _output_files(output or file.with_suffix(".output.jsonl"))
    for path in files:
        check_new(path)
    batch = _create_batch(file, endpoint)
    try:
        batch = wait(batch, ProgressMeter())
    except KeyboardInterrupt as interrupt:
        raise _handle_interrupt(batch["id"]) from interrupt
    except (errors.DaemonBusy, errors.NotRunning) as error:
        again = f"corral start, then corral batch show {batch['id']}"
        hint = f"{batch['id']} continues when the daemon runs again: {again}"
        raise errors.DaemonBusy(error.message, hint=hint) from error
    return _result(batch, files)


def list_batches() -> CommandResult:
    found: list[Object] = ask("GET", "/v1/batches", params={"limit": _LIST_MAX})["data"]
    rows = [_row(batch) for batch in found]
    text = table(_HEAD, rows) if rows else "no batches; corral batch run FILE.jsonl runs one"
    return CommandResult(found, text)


def show(batch_id: str, output: Path | None) -> CommandResult:
    """Show a batch; with `output`, write its results there."""
    batch: Object = ask("GET", _page(batch_id))
    if output is None:
        return CommandResult(batch, _text(batch), tuple(_notes(batch)))
    files = _output_files(output)
    for path in files:
        check_new(path)
    return _result(batch, files)


def cancel(batch_id: str) -> CommandResult:
    batch = ask("POST", f"{_page(batch_id)}/cancel")
    note = f"corral batch show {batch_id} shows the results so far"
    return CommandResult(batch, f"{batch_id} is {batch['status']}", (note,))


def _create_batch(path: Path, endpoint: str) -> Object:
    try:
        with open_regular(path) as file:
            form = {"file": (path.name, file, "application/jsonl")}
            uploaded = ask("POST", "/v1/files", data={"purpose": "batch"}, files=form)
        members = {"endpoint": endpoint, "completion_window": "24h"}
        batch: Object = ask(
            "POST", "/v1/batches", json={**members, "input_file_id": uploaded["id"]}
        )
    except KeyboardInterrupt as interrupt:
        raise errors.Interrupted(
            f"stopped while {path} was sent", hint="corral batch list shows whether it runs"
        ) from interrupt
    return batch


def _endpoint(path: Path) -> str:
    """Return the endpoint of a file's first line; the daemon checks all lines."""
    with access_denied(f"cannot read {path}"), open_regular(path) as file:
        lines = iter(lambda: file.readline(_LINE_MAX_BYTES), b"")
        line = next((line for line in lines if line.strip()), b"")
    try:
        url = json.loads(line.decode("utf-8-sig"))["url"]
    except (ValueError, KeyError, TypeError) as error:
        raise errors.CorralError(
            f"the first line of {path} is not a batch request", hint=f"a line is {_EXAMPLE}"
        ) from error
    return str(url)


def _output_files(output: Path) -> tuple[Path, Path]:
    name = output.name.removesuffix(".jsonl").removesuffix(".output")
    return output, output.with_name(f"{name}.errors.jsonl")


def _handle_interrupt(batch_id: str) -> errors.Interrupted:
    """After Ctrl-C the batch continues; a second Ctrl-C cancels it."""
    write(f"\n{batch_id} continues; Ctrl-C again cancels it", sys.stderr)
    try:
        time.sleep(_SECOND_S)
    except KeyboardInterrupt:
        cancel(batch_id)
        return errors.Interrupted(
            f"{batch_id} is cancelled",
            hint=f"corral batch show {batch_id} --output FILE.jsonl writes the results so far",
        )
    return errors.Interrupted(
        f"stopped waiting; {batch_id} continues",
        hint=f"corral batch show {batch_id} shows its progress, "
        f"with --output FILE.jsonl it writes the results; corral batch cancel {batch_id} ends it",
    )


def _result(batch: Object, files: tuple[Path, Path]) -> CommandResult:
    ids = (batch["output_file_id"], batch["error_file_id"])
    written = {path: file_id for path, file_id in zip(files, ids, strict=True) if file_id}
    for path, file_id in written.items():
        _download(file_id, path)
    is_success = batch["status"] == "completed" and not batch["request_counts"]["failed"]
    lines = [_text(batch), *(f"written: {path}" for path in written)]
    data = {**batch, "files": [str(path) for path in written]}
    notes = tuple(_notes(batch))
    return CommandResult(data, "\n".join(lines), notes, exit_code=0 if is_success else 1)


def _text(batch: Object) -> str:
    counts = batch["request_counts"]
    done = f"{counts['completed']} of {counts['total']} lines done, {counts['failed']} failed"
    style = {"completed": "green", "failed": "red", "expired": "red"}.get(batch["status"], "yellow")
    return f"{batch['id']}: {colored(batch['status'], style)}, {done}"


def _notes(batch: Object) -> Iterator[str]:
    if reason := batch.get("pause_reason"):
        yield f"it waits: {reason}"
    for error in (batch["errors"] or {"data": []})["data"]:
        where = f"line {error['line']}: " if error["line"] else ""
        yield f"{where}{error['message']}"


def _row(batch: Object) -> tuple[str, ...]:
    counts = batch["request_counts"]
    created = datetime.fromtimestamp(batch["created_at"], UTC).astimezone()
    status = f"{batch['status']}, waits" if batch.get("pause_reason") else batch["status"]
    return (
        *(batch["id"], status),
        *(str(counts[name]) for name in ("completed", "failed", "total")),
        *(f"{created:%Y-%m-%d %H:%M}", batch["endpoint"]),
    )

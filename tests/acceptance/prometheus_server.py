"""A Prometheus server: its binaries, one process, and its HTTP API."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final

import httpx
from support.corral_cli import until

INTERVAL_S: Final = 2
_CONFIG: Final = """
global: {{ scrape_interval: {interval_s}s, scrape_timeout: {interval_s}s }}
scrape_configs:
"""
_JOB: Final = """
  - job_name: "{job}"
    static_configs: [{{ targets: ["{target}"] }}]
"""


@dataclass(frozen=True)
class Binaries:
    """Where prometheus and promtool are."""

    prometheus: str
    promtool: str

    def version(self) -> str:
        done = _run(self.prometheus, "--version")
        return (done.stdout + done.stderr).splitlines()[0]

    def complaints(self, text: str) -> list[str]:
        """The output of `promtool check metrics` for a page, a line each."""
        done = subprocess.run(
            [self.promtool, "check", "metrics"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        return (done.stdout + done.stderr).splitlines()

    def failed_alert_tests(self, path: Path) -> list[str]:
        """The output of `promtool test rules`, a line each; empty if all alerts fire."""
        command = [self.promtool, "test", "rules", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return (done.stdout + done.stderr).splitlines() if done.returncode else []


def find(directory: Path | None, cache: Path) -> Binaries:
    """Find both in a directory, else on PATH, else in Debian's package, unpacked to a cache.

    Raises:
        OSError, CalledProcessError: They are nowhere.
    """
    if directory is None and shutil.which("prometheus") and shutil.which("promtool"):
        return Binaries("prometheus", "promtool")
    inside = directory or cache / "usr" / "bin"
    if directory is None and not (inside / "prometheus").exists():
        _unpack(cache)
    return Binaries(str(inside / "prometheus"), str(inside / "promtool"))


def _unpack(cache: Path) -> None:
    """Download Debian's package without installing it: that would start a service."""
    print("downloading Debian's package prometheus …", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [_program("apt-get"), "--quiet", "download", "prometheus"],
            cwd=directory,
            check=True,
            capture_output=True,
        )
        (package,) = Path(directory).glob("*.deb")
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run([_program("dpkg-deb"), "--extract", package, cache], check=True)


def _program(name: str) -> str:
    if found := shutil.which(name):
        return found
    raise FileNotFoundError(f"there is no {name}")


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=True)


class Prometheus:
    """The API of a running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._url}/-/ready").is_success
        except httpx.TransportError:
            return False

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("targets", state="active")["activeTargets"]
        return found

    def labels(self, job: str) -> Mapping[str, AbstractSet[str]]:
        """The labels of each series, by its name."""
        found: dict[str, set[str]] = {}
        for series in self._get("series", **{"match[]": f'{{job="{job}"}}'}):
            found.setdefault(series["__name__"], set()).update(series)
        return found

    def metadata(self, job: str) -> Mapping[str, tuple[str, str]]:
        """Type and help by the name of the family."""
        found = self._get("targets/metadata", match_target=f'{{job="{job}"}}', limit="1000")
        return {entry["metric"]: (entry["type"], entry["help"]) for entry in found}

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def _get(self, path: str, **query: str) -> Any:
        response = httpx.get(f"{self._url}/api/v1/{path}", params=query, timeout=30)
        return response.raise_for_status().json()["data"]


@contextmanager
def running(
    binaries: Binaries, home: Path, port: int, jobs: Mapping[str, str]
) -> Iterator[Prometheus]:
    """Run a server that reads targets, `HOST:PORT` by the name of the job."""
    config = home / "prometheus.yml"
    scrapes = "".join(_JOB.format(job=job, target=target) for job, target in jobs.items())
    config.write_text(_CONFIG.format(interval_s=INTERVAL_S) + scrapes)
    argv = [
        binaries.prometheus,
        f"--config.file={config}",
        f"--storage.tsdb.path={home / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with subprocess.Popen(argv) as process:
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            until(lambda: process.poll() is not None or server.is_ready())
            yield server
        finally:
            process.terminate()


@contextmanager
def relay(url: str, accept: str) -> Iterator[str]:
    """Pass GET on with another Accept, for what Prometheus cannot be set to; yield HOST:PORT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            response = httpx.get(url + self.path, headers={"Accept": accept})
            self.send_response(response.status_code)
            self.send_header("Content-Type", response.headers["Content-Type"])
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

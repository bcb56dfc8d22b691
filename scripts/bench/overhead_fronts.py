"""Starts the fronts that are measured, each in front of the same engine.

They are: none (`direct`), this proxy, another commit of it (`before`), relays on aiohttp that
decide nothing (`aiohttp` with its client, `floor` with ours), nginx, haproxy, LiteLLM and smg,
which routes by the prefixes of prompts. Each is one worker on one core that forwards streams
without buffering. nginx and haproxy open an upstream connection for each request, as llama-server
closes them after a stream; `nginx kept`, LiteLLM and smg reuse those of an engine that never closes
one. Missing programs are left out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from scripts.bench.overhead_load import body

_READY_TIMEOUT_S: Final = 180
# By default nginx's workers run as nobody, which cannot reach the engine's socket.
_NGINX: Final = """
user root;
daemon off; worker_processes 1; worker_rlimit_nofile 8192;
pid {home}/nginx.pid; error_log {home}/nginx.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m;
  keepalive_requests 1000000; keepalive_timeout 75s; tcp_nodelay on;
  client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fcgi;
  uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
  upstream engine {{ server unix:{socket}; {keep} }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "{connection}";
      proxy_buffering off; proxy_read_timeout 3600s;
    }}
  }}
}}
"""
_HAPROXY: Final = """
global
  nbthread 1
  maxconn 4096
defaults
  mode http
  timeout connect 5s
  timeout client 3600s
  timeout server 3600s
  option http-no-delay
  option http-server-close
frontend clients
  bind 127.0.0.1:{port} backlog 2048
  default_backend engine
backend engine
  server engine unix@{socket}
"""
_LITELLM: Final = """
model_list:
  - model_name: bench
    litellm_params: {{model: openai/bench, api_base: "{url}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
"""


@dataclass(frozen=True)
class Setup:
    """Paths and ports of all processes.

    Attributes:
        directory: Temporary, for configuration and logs.
        socket: The engine's unix socket.
        kept_socket: Its other one, on which it never closes a connection.
        engine_port: Its TCP port.
        litellm: LiteLLM's program, or None.
        smg: The program of the PyPI package smg, or None.
        against: Checkout of another commit of this project, or None.
        core: The core that every front is pinned to.
    """

    directory: Path
    socket: Path
    kept_socket: Path
    engine_port: int
    litellm: str | None
    smg: str | None
    against: Path | None
    core: int


@dataclass(frozen=True)
class Front:
    """`process` is None for the engine itself."""

    name: str
    port: int
    process: psutil.Popen | None

    def cpu_s(self) -> float:
        """CPU seconds of its processes."""
        times = [process.cpu_times() for process in self._processes()]
        return sum(time.user + time.system for time in times)

    def rss_mb(self) -> float:
        return sum(process.memory_info().rss for process in self._processes()) / 1e6

    def _processes(self) -> list[psutil.Process]:
        if self.process is None:
            return []
        return [self.process, *self.process.children(recursive=True)]


def start_fronts(setup: Setup, started: list[psutil.Popen]) -> list[Front]:
    """Start all fronts that are installed; the direct one comes first.

    Args:
        started: Every started process is appended, also if a later one fails.
    """
    fronts = [Front("direct", setup.engine_port, None)]
    for name, command in _COMMANDS.items():
        port = free_port()
        argv = command(setup, port)
        if argv is None:
            continue
        log = setup.directory / f"{name}.log"
        process = _start(argv, log, {setup.core}, setup.against if name == "before" else None)
        started.append(process)
        fronts.append(Front(name, port, process))
    for front in fronts:
        _await_answer(front, setup.directory / f"{front.name}.log")
    return fronts


def start_engine(setup: Setup, cores: set[int]) -> psutil.Popen:
    argv = [sys.executable, "-m", "scripts.bench.overhead_engine", "--port", str(setup.engine_port)]
    sockets = ["--socket", str(setup.socket), "--kept-socket", str(setup.kept_socket)]
    return _start([*argv, *sockets], setup.directory / "engine.log", cores)


def _start(
    argv: Sequence[str], log: Path, cores: set[int], directory: Path | None = None
) -> psutil.Popen:
    with log.open("wb") as output:
        process = psutil.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT},
            cwd=directory,
        )
    process.cpu_affinity(sorted(cores))
    return process


def stop(started: Sequence[psutil.Popen]) -> None:
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _before(setup: Setup, port: int) -> list[str] | None:
    return _corral(setup, port) if setup.against else None


def _corral(setup: Setup, port: int) -> list[str]:
    module = "scripts.bench.overhead_front"
    return [sys.executable, "-m", module, "--socket", str(setup.socket), "--port", str(port)]


def _aiohttp(setup: Setup, port: int) -> list[str]:
    return _relay(setup, port, "aiohttp")


def _floor(setup: Setup, port: int) -> list[str]:
    return _relay(setup, port, "corral")


def _relay(setup: Setup, port: int, client: str) -> list[str]:
    where = ["--socket", str(setup.socket), "--port", str(port)]
    return [sys.executable, "-m", "scripts.bench.overhead_floor", *where, "--client", client]


def _nginx(setup: Setup, port: int) -> list[str] | None:
    return _nginx_with(setup, port, "nginx", setup.socket, connection="close", keep="")


def _nginx_kept(setup: Setup, port: int) -> list[str] | None:
    keep = "keepalive 128; keepalive_requests 1000000;"
    return _nginx_with(setup, port, "kept", setup.kept_socket, connection="", keep=keep)


def _nginx_with(setup: Setup, port: int, name: str, engine: Path, **words: str) -> list[str] | None:
    program = shutil.which("nginx", path=_WITH_SBIN)
    home = setup.directory / name
    home.mkdir()
    file = home / "nginx.conf"
    file.write_text(_NGINX.format(home=home, socket=engine, port=port, **words))
    return [program, "-c", str(file), "-p", str(home)] if program else None


def _haproxy(setup: Setup, port: int) -> list[str] | None:
    program = shutil.which("haproxy", path=_WITH_SBIN)
    file = setup.directory / "haproxy.cfg"
    file.write_text(_HAPROXY.format(socket=setup.socket, port=port))
    return [program, "-db", "-f", str(file)] if program else None


def _litellm(setup: Setup, port: int) -> list[str] | None:
    if setup.litellm is None:
        return None
    file = setup.directory / "litellm.yaml"
    file.write_text(_LITELLM.format(url=f"http://127.0.0.1:{setup.engine_port}"))
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return [setup.litellm, "--config", str(file), *where, "--telemetry", "False"]


def _smg(setup: Setup, port: int) -> list[str] | None:
    if setup.smg is None:
        return None
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    workers = ["--worker-urls", f"http://127.0.0.1:{setup.engine_port}"]
    policy = ["--policy", "cache_aware", "--disable-tokenizer-autoload"]
    return [setup.smg, "launch", *workers, *policy, *where, "--log-level", "error"]


def _await_answer(front: Front, log: Path) -> None:
    """Wait until it answers a chat: smg accepts connections before it knows its engine."""
    until_s = time.monotonic() + _READY_TIMEOUT_S
    url = f"http://127.0.0.1:{front.port}/v1/chat/completions"
    chat = urllib.request.Request(url, body(is_stream=False), _HEADERS)
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(chat, timeout=10):  # noqa: S310
            return
        if front.process is not None and front.process.poll() is not None:
            break
        time.sleep(0.1)
    raise SystemExit(f"{front.name} did not start:\n{log.read_text()[-2000:]}")


_COMMANDS: Final[Mapping[str, Callable[[Setup, int], list[str] | None]]] = {
    "corral": _corral,
    "before": _before,
    "aiohttp": _aiohttp,
    "floor": _floor,
    "nginx": _nginx,
    "nginx kept": _nginx_kept,
    "haproxy": _haproxy,
    "litellm": _litellm,
    "smg": _smg,
}
_HEADERS: Final = {"Content-Type": "application/json", "Authorization": "Bearer none"}
_WITH_SBIN: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_ENVIRONMENT: Final = {
    # Keep LiteLLM from downloading its price list and from sending telemetry.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOG": "ERROR",
    # It listens on loopback; a key check would only cost it time.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "NO_PROXY": "127.0.0.1",
}

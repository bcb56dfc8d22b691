"""What is measured: nothing, this proxy, nginx, haproxy, LiteLLM; each in front of one engine.

Each proxy is one worker on one core, told to pass a stream on at once. nginx and haproxy open a
connection for each request, which is what all come to in front of llama-server: it closes one after
a stream. For comparison there is `nginx kept`, in front of an engine that never closes one. What is
not installed is left out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_READY_TIMEOUT_S: Final = 180
# Started by root, nginx would ask as nobody, whom the engine's directory keeps out.
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
class Place:
    """Where things are, for all that is started.

    Attributes:
        home: A directory of the run's own.
        socket: The engine's unix socket.
        kept_socket: Another, on which it never closes a connection.
        engine_port: The engine's TCP port.
        litellm: The program of LiteLLM, or None.
        core: The core that every proxy is pinned to.
    """

    home: Path
    socket: Path
    kept_socket: Path
    engine_port: int
    litellm: str | None
    core: int


@dataclass(frozen=True)
class Front:
    """One thing that a client can ask.

    Attributes:
        name: Its name.
        port: Its TCP port on loopback.
        process: Its first process, or None where the client asks the engine itself.
    """

    name: str
    port: int
    process: psutil.Popen | None

    def cpu_s(self) -> float:
        """Return the processor seconds that it and its children have used."""
        times = [process.cpu_times() for process in self._processes()]
        return sum(one.user + one.system for one in times)

    def rss_mb(self) -> float:
        """Return its resident memory, its children's included, in millions of bytes."""
        return sum(process.memory_info().rss for process in self._processes()) / 1e6

    def _processes(self) -> list[psutil.Process]:
        if self.process is None:
            return []
        return [self.process, *self.process.children(recursive=True)]


def fronts(place: Place, started: list[psutil.Popen]) -> list[Front]:
    """Start everything there is, the direct way first; say what there is not.

    Args:
        place: Where things are.
        started: Every process that was started is added, whatever happens.
    """
    found = [Front("direct", place.engine_port, None)]
    for name, command in _COMMANDS.items():
        port = free_port()
        argv = command(place, port)
        if argv is None:
            print(f"{name} is not installed: left out", file=sys.stderr)
            continue
        process = _start(argv, place.home / f"{name}.log", {place.core}, _ENVIRONMENT)
        started.append(process)
        found.append(Front(name, port, process))
    for front in found:
        _await_port(front, place.home / f"{front.name}.log")
    return found


def engine(place: Place, cores: set[int]) -> psutil.Popen:
    """Start the engine."""
    argv = [sys.executable, "-m", "scripts.bench.overhead_engine", "--port", str(place.engine_port)]
    sockets = ["--socket", str(place.socket), "--kept-socket", str(place.kept_socket)]
    return _start([*argv, *sockets], place.home / "engine.log", cores)


def _start(
    argv: Sequence[str], log: Path, cores: set[int], environment: Mapping[str, str] | None = None
) -> psutil.Popen:
    with log.open("wb") as output:
        process = psutil.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    process.cpu_affinity(sorted(cores))
    return process


def stop(started: Sequence[psutil.Popen]) -> None:
    """End what was started."""
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        process.wait()


def free_port() -> int:
    """Return a TCP port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _corral(place: Place, port: int) -> list[str]:
    module = "scripts.bench.overhead_front"
    return [sys.executable, "-m", module, "--socket", str(place.socket), "--port", str(port)]


def _nginx(place: Place, port: int) -> list[str] | None:
    return _nginx_with(place, port, "nginx", place.socket, connection="close", keep="")


def _nginx_kept(place: Place, port: int) -> list[str] | None:
    keep = "keepalive 128; keepalive_requests 1000000;"
    return _nginx_with(place, port, "kept", place.kept_socket, connection="", keep=keep)


def _nginx_with(place: Place, port: int, name: str, engine: Path, **words: str) -> list[str] | None:
    program = shutil.which("nginx", path=_WITH_SBIN)
    home = place.home / name
    home.mkdir()
    file = home / "nginx.conf"
    file.write_text(_NGINX.format(home=home, socket=engine, port=port, **words))
    return [program, "-c", str(file), "-p", str(home)] if program else None


def _haproxy(place: Place, port: int) -> list[str] | None:
    program = shutil.which("haproxy", path=_WITH_SBIN)
    file = place.home / "haproxy.cfg"
    file.write_text(_HAPROXY.format(socket=place.socket, port=port))
    return [program, "-db", "-f", str(file)] if program else None


def _litellm(place: Place, port: int) -> list[str] | None:
    if place.litellm is None:
        return None
    file = place.home / "litellm.yaml"
    file.write_text(_LITELLM.format(url=f"http://127.0.0.1:{place.engine_port}"))
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return [place.litellm, "--config", str(file), *where, "--telemetry", "False"]


def _await_port(front: Front, log: Path) -> None:
    """Wait until it accepts connections; the wall clock is what there is to go by."""
    until_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < until_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", front.port)) == 0:
                return
        if front.process is not None and front.process.poll() is not None:
            break
        time.sleep(0.1)
    raise SystemExit(f"{front.name} did not start:\n{log.read_text()[-2000:]}")


_COMMANDS: Final[Mapping[str, Callable[[Place, int], list[str] | None]]] = {
    "corral": _corral,
    "nginx": _nginx,
    "nginx kept": _nginx_kept,
    "haproxy": _haproxy,
    "litellm": _litellm,
}
_WITH_SBIN: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_ENVIRONMENT: Final = {
    # LiteLLM would ask the network for its list of prices, and tell it of itself.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOG": "ERROR",
    # On loopback, for a minute; keys would only cost it time.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "NO_PROXY": "127.0.0.1",
}

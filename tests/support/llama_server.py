"""A small program that behaves like llama-server, with faults on switches.

    python llama_server.py --host PATH.sock [--fault NAME[=VALUE]] …
    python llama_server.py --host 127.0.0.1 --port 0

It stands in where the real engine cannot be brought to misbehave. It listens at once and answers
503 until it is loaded, asks for LLAMA_API_KEY, and knows child mode: reports on stdout, the exit
line and the end of stdin. Faults:

    crash-at-start        fail to load, as on a missing file
    slow-load=S           load for S seconds, telling progress ten times a second
    silent-load           load for ever without a word
    no-child-mode         an old build: no reports, deaf on stdin
    ignore-sigterm        live on after SIGTERM, the exit line and the end of stdin
    exit-after-ready      exit with 0 once the warm-up was answered
    crash-after-ready     die of SIGSEGV once the warm-up was answered
    sick                  answer 500 to completions until two looks at its health got 503
    wedged                after the warm-up answer no completion, but that it is well all the same
    spins                 use a processor all the time, to no result
    fails-once            answer 500 to the second completion
    no-completion         answer 501 to completions, as an engine for embeddings does
    no-key                answer to everybody, as a stranger on our port would
    flood-stderr=BYTES    write that much in lines of a hundred bytes before loading
    megabyte-line         write a line of a megabyte before loading
    endless-line=BYTES    write that much, no text in any encoding and no newline, before loading
    flood-stream          answer a stream with chunks of 64 KiB, as fast as they are taken, for ever
    obedient=FILE         answer a chat with the entry of ODD under the name of its `user`;
                          whoever is to die once takes the file with it
    grandchild            leave a process behind that holds the pipes
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

Json = dict[str, Any]

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
# Answers that no engine should give, by the name they are asked for.
ODD = {
    "dies once": JSON + b"Content-Length: 2\r\n\r\n{}",
    "closes quietly": JSON + b"Content-Length: 2\r\n\r\n{}",
    "hangs up": b"",
    "says nothing": b"",
    "no HTTP": b"\0\xff\xfe garbage\r\n\r\n",
    "HTML": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
    "too short": JSON + b"Content-Length: 100\r\n\r\n{}",
    "too long": JSON + b"Content-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n\r\n",
    "hints first": b"HTTP/1.1 103 Early Hints\r\n\r\n" + JSON + b"Content-Length: 2\r\n\r\n{}",
    "trailers": STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
    b"e\r\ndata: [DONE]\n\n\r\n0\r\nX-Trailer: 1\r\n\r\n",
    "bad chunk": STREAM
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK)
    + b"zz\r\n",
    "cut mid-stream": STREAM
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK),
    "no JSON in it": STREAM + b"\r\ndata: {garbage\n\ndata: [DONE]\n\n",
    "line without end": STREAM + b"\r\ndata: ",
    "falls silent": STREAM + b"\r\n" + CHUNK,
    "long header": JSON + b"X: " + b"x" * 1_000_000 + b"\r\n\r\n",
}


class Engine:
    """The state that the handlers and the main thread share."""

    def __init__(self, faults: dict[str, str]) -> None:
        self.faults = faults
        self.loaded = False
        self.looks_to_refuse = 0
        self.completions = 0
        self.is_cured = False
        self.mark = faults.get("obedient", "")
        self.key = os.environ.get("LLAMA_API_KEY", "")
        self.is_child = "LLAMA_SERVER_ROUTER_PORT" in os.environ and "no-child-mode" not in faults

    def has(self, fault: str) -> bool:
        return fault in self.faults

    def report(self, **payload: Any) -> None:
        if self.is_child:
            print(f"cmd_child_to_router:state:{json.dumps(payload)}", flush=True)


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._route({"/props": self._props, "/slots": self._slots, "/metrics": self._metrics})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body: Json = json.loads(self.rfile.read(length) or b"{}")
        self._route({"/completion": self._complete, "/v1/chat/completions": self._chat})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
        log(f"srv  request: {format % args}")

    def address_string(self) -> str:
        return "client"

    def _route(self, routes: dict[str, Callable[[], None]]) -> None:
        engine = self.engine
        known = engine.has("no-key") or self.headers.get("Authorization") == f"Bearer {engine.key}"
        if not engine.loaded:
            self._refuse(503, "Loading model")
        elif self.path == "/health":
            self._health()
        elif not known:
            self._refuse(401, "Invalid API Key")
        elif answer := routes.get(self.path):
            answer()
        else:
            self._refuse(404, "File Not Found")

    def _health(self) -> None:
        if self.engine.looks_to_refuse:
            self.engine.looks_to_refuse -= 1
            self.engine.is_cured = not self.engine.looks_to_refuse
            self._refuse(503, "no")
        else:
            self._answer({"status": "ok"})

    def _props(self) -> None:
        settings = {"n_ctx": 256}
        self._answer({"total_slots": 2, "model_path": "m", "default_generation_settings": settings})

    def _slots(self) -> None:
        slot = {"n_ctx": 256, "is_processing": True, "next_token": [{"n_decoded": 7}]}
        self._answer([{"id": 0, "n_ctx": 256, "is_processing": False}, {"id": 1, **slot}])

    def _metrics(self) -> None:
        self._send(b'# HELP x\nllamacpp:n_decode_total 7\nllamacpp:per{a="1"} 1\n', "text/plain")

    def _complete(self) -> None:
        self.engine.completions += 1
        if self.engine.has("no-completion"):
            self._refuse(501, "This server does not support completions")
        elif self.engine.has("sick") and not self.engine.is_cured:
            self.engine.looks_to_refuse = 2
            self._refuse(500, "decode failed")
        elif self.engine.has("fails-once") and self.engine.completions == 2:
            self._refuse(500, "decode failed")
        elif self.engine.has("wedged") and self.engine.completions > 1:
            threading.Event().wait()
        else:
            self._answer({"content": "a"})
            self._maybe_go()

    def _maybe_go(self) -> None:
        self.wfile.flush()
        if self.engine.has("exit-after-ready"):
            os._exit(0)
        if self.engine.has("crash-after-ready"):
            os.kill(os.getpid(), signal.SIGSEGV)

    def _chat(self) -> None:
        if self.engine.has("obedient") and "user" in self.body:
            self._be_odd(self.body["user"])
            return
        if not self.body.get("stream"):
            self._answer({"choices": [{"message": {"role": "assistant", "content": "abc"}}]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        while self.engine.has("flood-stream"):
            self.wfile.write(b'data: {"choices": [], "x": "' + b"x" * 65536 + b'"}\n\n')
        for letter in "abc":
            chunk = {"choices": [{"delta": {"content": letter}}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _be_odd(self, how: str) -> None:
        if how == "dies once":
            with contextlib.suppress(FileNotFoundError):
                Path(self.engine.mark).unlink()
                os._exit(1)
        self.wfile.write(ODD[how])
        self.wfile.flush()
        if how in {"says nothing", "falls silent"}:
            threading.Event().wait()
        while how == "line without end":
            self.wfile.write(b"x" * 65536)
        self.close_connection = True

    def _answer(self, payload: Json | list[Json], status: int = 200) -> None:
        self._send(json.dumps(payload).encode(), "application/json", status)

    def _refuse(self, status: int, message: str) -> None:
        self._answer({"error": {"code": status, "message": message, "type": "fake"}}, status)

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Tcp(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


class Unix(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def log(text: str) -> None:
    print(f"0.00.001.000 I {text}", file=sys.stderr, flush=True)


def listen(host: str, port: int) -> tuple[socketserver.BaseServer, str]:
    """Return the server and its address as the real engine prints it."""
    if host.endswith(".sock"):
        return Unix(host, Handler), f"unix://{host}"
    server = Tcp((host, port), Handler)
    return server, f"http://{host}:{server.server_address[1]}"


def load(engine: Engine) -> None:
    if engine.has("crash-at-start"):
        log("E gguf_init_from_file: failed to open GGUF file 'x' (No such file or directory)")
        sys.exit(1)
    for _ in range(int(engine.faults.get("flood-stderr") or 0) // 100):
        sys.stderr.write("x" * 99 + "\n")
    if engine.has("megabyte-line"):
        sys.stderr.write("y" * 1024**2 + "\n")
    for _ in range(int(engine.faults.get("endless-line") or 0) // 65536):
        sys.stderr.buffer.write(b"\xff\xfe" * 32768)
    if engine.has("spins"):
        threading.Thread(target=spin, daemon=True).start()
    if engine.has("silent-load"):
        threading.Event().wait()
    steps = int(float(engine.faults.get("slow-load") or 0) * 10)
    for step in range(steps):
        payload = {"stages": ["text_model"], "current": "text_model", "value": step / steps}
        engine.report(state="loading", payload=payload)
        threading.Event().wait(0.1)


def spin() -> None:
    while True:
        sum(range(10_000))


def obey(engine: Engine) -> None:
    """Take orders from stdin; the end of it is one."""
    if not engine.is_child:
        return
    for line in sys.stdin:
        if (
            engine.loaded
            and line == "cmd_router_to_child:exit\n"
            and not engine.has("ignore-sigterm")
        ):
            os._exit(0)
    while not engine.loaded:
        threading.Event().wait(0.01)
    if not engine.has("ignore-sigterm"):
        os._exit(1)


def on_sigterm(engine: Engine) -> None:
    """Once loaded, as the real one: in child mode nothing ends before stdin does."""
    if not engine.is_child and not engine.has("ignore-sigterm"):
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fault", action="append", default=[])
    words = parser.parse_args()
    engine = Handler.engine = Engine(dict((f"{f}=").split("=")[:2] for f in words.fault))
    if engine.has("ignore-sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if engine.has("grandchild"):
        child = subprocess.Popen(["/bin/sleep", "600"])
        log(f"grandchild {child.pid}")
    server, address = listen(words.host, words.port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=obey, args=(engine,), daemon=True).start()
    load(engine)
    if not engine.has("ignore-sigterm"):
        signal.signal(signal.SIGTERM, lambda *_: on_sigterm(engine))
    engine.loaded = True
    log(f"srv  llama_server: listening on {address}")
    engine.report(state="ready", payload={})
    while True:
        signal.pause()


if __name__ == "__main__":
    main()

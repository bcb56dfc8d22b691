"""Use llama-server's router mode and this project with the same real client, and compare.

The client is pi-llama-cpp, the extension of the pi coding agent for llama-server. Exits with 1
where a check fails with this project.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from support import tiny_gguf
from support.corral_cli import CorralCli, until

from supervisor.builds.discover import load
from supervisor.rpc.address import free_port

ROOT: Final = Path(__file__).parent.parent.parent
PACKAGES: Final = ("pi-llama-cpp@0.14.0", "esbuild")
CHECKS: Final = ("mode", "looking", "load", "progress", "chat", "unload")
OURS: Final = "llama-corral"
TIMEOUT_S: Final = 120


def main() -> int:
    if shutil.which("npm") is None:
        print("npm is not installed; install Node.js 20 or newer", file=sys.stderr)
        return 2
    program = _built()
    found: dict[str, Mapping[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="router-") as directory:
        models = Path(directory, "models")
        models.mkdir()
        for name in ("a", "b"):
            tiny_gguf.make(models / f"{name}.gguf")
        with _router(models) as url:
            found["llama-server"] = _run(program, url)
        with _corral(Path(directory), models) as url:
            found[OURS] = _run(program, url)
    _print(found)
    return int(any(result != "ok" for result in found[OURS].values()))


def _built() -> Path:
    """Install the client, and bundle it with its program."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    node = home / "llama-corral" / "router_client"
    node.mkdir(parents=True, exist_ok=True)
    # Its peers are the agent itself, of which it needs the types alone.
    npm = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--legacy-peer-deps"]
    subprocess.run([*npm, "--prefix", str(node), *PACKAGES], check=True)
    source, built = node / "router_client.ts", node / "router_client.mjs"
    source.write_bytes((ROOT / "tests" / "acceptance" / "router_client.ts").read_bytes())
    options = ["--bundle", "--platform=node", "--format=esm", "--log-level=error"]
    bundler = str(node / "node_modules" / ".bin" / "esbuild")
    subprocess.run([bundler, str(source), *options, f"--outfile={built}"], check=True)
    return built


@contextmanager
def _router(models: Path) -> Iterator[str]:
    """Yield the address of llama-server in router mode."""
    engine = load(None, cache_dir=models.parent / "cache")
    port = free_port()
    paths = os.pathsep.join(map(str, engine.library_dirs))
    options = ["--models-dir", str(models), "--port", str(port), "--no-ui", "-c", "512", "-np", "1"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [str(engine.path), *options],
        env={**os.environ, "LD_LIBRARY_PATH": paths, "LLAMA_CACHE": str(models.parent / "cache")},
        stdout=quiet,
        stderr=quiet,
    ) as process:
        try:
            until(lambda: _answers(port))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def _corral(directory: Path, models: Path) -> Iterator[str]:
    """Yield the address of a daemon with the same models, none of them loaded."""
    corral = CorralCli(directory)
    tables = [
        f'[models.{path.stem}]\npath = "{path}"\npreload = false\n'
        for path in sorted(models.iterdir())
    ]
    corral.configure("\n".join(tables))
    try:
        corral.serve()
        yield corral.url
    finally:
        corral.end()


def _run(program: Path, url: str) -> Mapping[str, str]:
    words = ["node", str(program), url]
    ran = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    said = {line["check"]: line["result"] for line in lines}
    missing = (ran.stderr.strip().splitlines() or ["no result"])[-1]
    return {check: said.get(check, missing) for check in CHECKS}


def _print(found: Mapping[str, Mapping[str, str]]) -> None:
    print(f"{'':<13}", *(f"{check:<9}" for check in CHECKS))
    for name, results in found.items():
        print(f"{name:<13}", *(f"{results[check]:<9}" for check in CHECKS))


if __name__ == "__main__":
    sys.exit(main())

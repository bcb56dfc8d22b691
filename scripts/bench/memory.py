"""Compare the memory estimate with the allocations that the engine logs, over a grid of flags.

Each model takes about 200 engine starts, a quarter of a second each for SmolLM2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Final

from support.buffers import PARTS, Comparison, compare

from supervisor.builds.discover import Engine, load
from supervisor.builds.help import FlagValue
from supervisor.models import pinned
from supervisor.system.paths import directories

MEDIAN_MAX: Final = 0.03
WORST_MAX: Final = 0.10
MIB: Final = 1024**2
CONTEXTS: Final = (1024, 2048, 4096, 8192, 16384)
SLOTS: Final = ((1, False), (2, False), (2, True), (4, False), (4, True))


def main() -> int:
    """Measure, print, and return 1 when the error is above a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", type=Path, metavar="GGUF")
    parser.add_argument("--all", action="store_true", help="print every case")
    options = parser.parse_args()
    engine = load(None, cache_dir=directories().cache)
    paths = options.models or [smollm2()]
    return max(judge(engine, path, is_verbose=options.all) for path in paths)


def smollm2() -> Path:
    return pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)


def grid() -> Iterator[dict[str, FlagValue]]:
    for ctx, (slots, unified), flash in product(CONTEXTS, SLOTS, ("on", "off", "auto")):
        yield case(ctx, slots, unified=unified) | {"flash-attn": flash}
    for ctx, (slots, unified), types in product(
        (1024, 4096, 16384), SLOTS, (("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "f16"))
    ):
        yield case(ctx, slots, unified=unified) | dict(
            zip(("cache-type-k", "cache-type-v"), types, strict=True)
        )
    for ctx, (slots, unified), ubatch in product((1024, 4096), SLOTS, (32, 128, 1024, 2048)):
        yield case(ctx, slots, unified=unified) | {"ubatch-size": ubatch}
    for ctx, (slots, unified) in product((1024, 4096, 16384), SLOTS):
        yield case(ctx, slots, unified=unified) | {"swa-full": True}
        yield case(ctx, slots, unified=unified) | {"spec-type": "ngram-mod"}


def case(ctx: int, slots: int, *, unified: bool) -> dict[str, FlagValue]:
    return {"ctx-size": ctx, "parallel": slots, "kv-unified": unified, "flash-attn": "on"}


def judge(engine: Engine, path: Path, *, is_verbose: bool) -> int:
    """Print the errors of one model, and return 1 when they are above a limit."""
    found = []
    for flags in grid():
        one = compare(engine, path, flags)
        found.append(one)
        if is_verbose:
            print(row(one))
    errors = [abs(entry.error) for entry in found]
    worst = max(found, key=lambda entry: abs(entry.error))
    print(f"{path.name}, {len(found)} cases: median {statistics.median(errors):.2%}")
    print(f"worst:   {row(worst)}")
    for part in PARTS:
        print(f"{part:8} {spread([entry.part_error(part) for entry in found])}")
    is_within = statistics.median(errors) < MEDIAN_MAX and max(errors) < WORST_MAX
    if not is_within:
        print(f"above the limit of {MEDIAN_MAX:.0%} (median) or {WORST_MAX:.0%} (worst)")
    return 0 if is_within else 1


def row(comparison: Comparison) -> str:
    """Return a line: the error, and logged/estimated MiB of each part."""
    sizes = "  ".join(
        f"{part} {comparison.logged[part] / MIB:.2f}/{comparison.estimated[part] / MIB:.2f}"
        for part in PARTS
    )
    flags = " ".join(f"{key}={value}" for key, value in comparison.flags.items())
    return f"{comparison.error:+.2%}  {sizes}  {flags}"


def spread(errors: Sequence[float]) -> str:
    return f"median {statistics.median(errors):+.2%}, {min(errors):+.2%} to {max(errors):+.2%}"


if __name__ == "__main__":
    sys.exit(main())

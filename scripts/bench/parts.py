"""The parts of the comparison: which script measures each, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        script: Below the project's directory; takes `--json FILE`.
        about: The comparison, as Markdown.
        full: Options of a full run.
        quick: Options of a quick run.
        full_s: Limit of a full run; about twice the time on two cores.
        quick_s: Limit of a quick run.
    """

    name: str
    script: str
    about: str
    full: Sequence[str] = ()
    quick: Sequence[str] = ()
    full_s: float = 300
    quick_s: float = 120


PARTS: Final = (
    Part(
        "Defaults",
        "scripts/bench/defaults",
        "Each profile against `llama-server --model FILE` of the same build, with nothing set.",
        ("--repeats", "3"),
        ("--repeats", "1"),
        full_s=600,
        quick_s=240,
    ),
    Part(
        "Slots that follow demand",
        "scripts/bench/demand",
        "`base` against the plain engine with as many slots as clients, once the slots settled.",
        ("--repeats", "3"),
        ("--repeats", "1", "--clients", "4", "8"),
        full_s=480,
        quick_s=150,
    ),
    Part(
        "Pauses of running streams",
        "scripts/bench/decode_gaps",
        "Four streams while prompts of 2 000 tokens arrive, with `prefer_pure_decode` and without.",
        ("--repeats", "3"),
        ("--repeats", "1", "--prompts", "2"),
        full_s=480,
        quick_s=120,
    ),
    Part(
        "Change of models",
        "scripts/bench/router",
        "Three models on room for two, against llama-server's router mode.",
        ("--repeats", "2"),
        ("--repeats", "1", "--requests", "20", "--words", "300"),
        full_s=240,
        quick_s=90,
    ),
    Part(
        "Cost of an idle daemon",
        "scripts/bench/idle",
        "Processor time and memory of the daemon alone.",
        ("--seconds", "45"),
        ("--seconds", "15"),
        full_s=120,
        quick_s=90,
    ),
    Part(
        "Reload under load",
        "scripts/reload_under_load",
        "Settings are reloaded while eight clients stream without a pause.",
        (),
        ("--reloads", "4"),
        full_s=180,
        quick_s=120,
    ),
    Part(
        "Return of a conversation",
        "scripts/bench/return",
        "A conversation whose engine stopped and started again: its cache, and its first token.",
        (),
        ("--words", "700"),
        full_s=180,
        quick_s=150,
    ),
    Part(
        "Change of models under load",
        "scripts/bench/swap",
        "Failures, cuts, loads and waits with three models on memory for two.",
        ("--requests", "120"),
        ("--requests", "40", "--calls", "1"),
        full_s=180,
        quick_s=120,
    ),
    Part(
        "Layers between two workers",
        "scripts/bench/shards",
        "A model over two workers, one at a quarter of the other's speed: what is estimated, and "
        "what moving layers gains.",
        ("--repeats", "3"),
        ("--repeats", "1"),
        full_s=180,
        quick_s=60,
    ),
    Part(
        "Cache affinity",
        "scripts/bench/affinity",
        "Two engines of one thread each: routing by cache against other policies.",
        ("--seeds", "2", "--repeats", "2"),
        ("--seeds", "1", "--repeats", "1", "--tiny"),
        full_s=300,
        quick_s=90,
    ),
    Part(
        "Overhead of the proxy",
        "scripts/bench/overhead",
        "Proxies on one core each, before an engine that costs almost nothing, and before a slow "
        "one, which takes 5 ms to its first token.",
        (),
        ("--quick",),
        full_s=480,
        quick_s=150,
    ),
    Part(
        "A card that gives way",
        "scripts/bench/give_way",
        "A program fills the software device: models leave it and return, while clients stream.",
        ("--rounds", "2"),
        ("--quick",),
        full_s=480,
        quick_s=150,
    ),
    Part(
        "Devices",
        "scripts/bench/device",
        "Flash attention, q8_0 KV, layers and ubatch on a GPU, or on Mesa's software device.",
        ("--repeats", "3"),
        ("--repeats", "1"),
        full_s=600,
        quick_s=120,
    ),
)

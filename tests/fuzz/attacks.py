"""HTTP inputs by number: a seed and a number always give the same input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Final

from fuzz.bodies import PAGES, body
from fuzz.fields import fields, pages
from fuzz.framing import framing
from fuzz.mutate import changed, changed_bytes, encode
from fuzz.packed import compressed, forms, large
from fuzz.poison import poison
from fuzz.request import Input, credentials, post


def members(random: Random) -> Input:
    path = random.choice(PAGES)
    content = body(random, path)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        content = changed(random, content)
        if not isinstance(content, dict):
            break
    data = encode(content, random)
    if random.random() < 0.08:
        data = changed_bytes(random, data)
    return Input("members", (post(path, data, credentials(random)),))


_KINDS: Final[dict[Callable[[Random], Input], int]] = {
    members: 38,
    poison: 15,
    framing: 14,
    fields: 10,
    pages: 6,
    forms: 7,
    compressed: 4,
    large: 2,
}


def attack(seed: int, number: int) -> Input:
    random = Random(f"{seed}/http/{number}")
    made = random.choices(list(_KINDS), list(_KINDS.values()))[0](random)
    chance = random.random()
    if chance < 0.10:
        moment_s = random.choice((0, 0.001, 0.02, 0.1, 0.5, 1.5))
        return dataclasses.replace(
            made, leave_after_s=moment_s, is_reset=random.random() < 0.5, is_whole=False
        )
    if chance < 0.13:
        return _slow(random, made)
    if chance < 0.14:
        return Input("silent", (made.data[: random.randrange(2)],), leave_after_s=8, is_whole=False)
    return made


def _slow(random: Random, made: Input) -> Input:
    """Send the same bytes in delayed pieces; the last may be missing."""
    data = made.data[:20_000]
    size = max(1, len(data) // random.choice((3, 10, 40)))
    pieces = tuple(data[at : at + size] for at in range(0, len(data), size))
    pieces = pieces[: random.choice((len(pieces), max(1, len(pieces) - 1)))]
    pause_s = random.choice((0.01, 0.1, 0.3))
    return Input("slow", pieces, pause_s, leave_after_s=6, is_whole=False)

"""The text of a tuned profile: the flags, and the evidence for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.engines.help import FlagValue
from supervisor.flags.tuned import Evidence
from supervisor.tune.variant import Variant

_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


@dataclass(frozen=True, slots=True)
class TunedText:
    """What a tuned profile says."""

    model: str
    profile: str
    variant: Variant
    evidence: Evidence
    command: str
    facts: Sequence[tuple[str, str]]  # what was measured, by name


def render(tuned: TunedText) -> str:
    """Return the file's text; nothing in it can end a comment or a string."""
    goal = tuned.evidence.goal
    lines = [
        *_comments(
            f"Written by: {tuned.command}",
            f"It lies on the profile {tuned.profile}; [models.{tuned.model}.flags] wins over it.",
            f"To be rid of it: corral tune {tuned.model} --undo",
            "",
            *(f"{name}: {value}" for name, value in tuned.facts),
        ),
        "",
        f"description = {_quoted(f'{tuned.model} on this machine, tuned for {goal}')}",
        f"extends = {_quoted(tuned.profile)}",
        *([f"replicas = {tuned.variant.replicas}"] if tuned.variant.replicas else []),
        "",
        "[flags]",
        *_table(dict(tuned.variant.flags)),
        "",
        "[tuned]",
        *_table({key: getattr(tuned.evidence, key) for key in Evidence.__slots__}),
    ]
    return "\n".join(lines) + "\n"


def _table(values: Mapping[str, FlagValue]) -> Iterator[str]:
    for key, value in values.items():
        yield f"{key} = {_literal(value)}"


def _literal(value: FlagValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return f'"{"".join(_escaped(one) for one in text)}"'


def _escaped(one: str) -> str:
    if one in _ESCAPES:
        return _ESCAPES[one]
    is_surrogate = 0xD800 <= ord(one) <= 0xDFFF  # TOML has none
    return one if one.isprintable() else "?" if is_surrogate else f"\\U{ord(one):08X}"


def _comments(*paragraphs: str) -> Iterable[str]:
    return [f"# {_one_line(text)}".rstrip() for text in paragraphs]


def _one_line(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text)

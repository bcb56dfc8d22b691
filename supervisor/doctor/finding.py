"""One thing that was looked at, and how to tell of it without telling too much."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from supervisor.errors import CorralError
from supervisor.settings.load import flatten
from supervisor.settings.schema import Settings

Level = Literal["ok", "warn", "fail"]

_HIDDEN: Final = "[hidden]"
# Options of llama-server that take a secret: --api-key, --hf-token; and what may come.
_SECRET: Final = re.compile(r"(?:^|[.-])(?:key|token|password|secret)$")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What was looked at, such as `engine` or `model chat`.
        level: `fail`: something will not work. `warn`: it works, but worse than it could.
        text: What was found, without a full stop.
        fix: What to do about it; None where there is nothing to do.
    """

    name: str
    level: Level
    text: str
    fix: str | None = None


def failed(name: str, error: CorralError) -> Finding:
    """Return what an error means for something."""
    return Finding(name, "fail", error.message, error.hint)


def redact(finding: Finding, home: Path, secrets: Iterable[str]) -> Finding:
    """Return a finding that can be shown to anybody: home as `~`, no secrets."""

    def clean(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, _HIDDEN)
        return text.replace(str(home), "~") if home != Path(home.anchor) else text

    cure = finding.fix and clean(finding.fix)
    return replace(finding, name=clean(finding.name), text=clean(finding.text), fix=cure)


def secrets_of(settings: Settings) -> tuple[str, ...]:
    """Return every value in the settings that nobody else should see, longest first."""
    found = {
        str(value)
        for model in settings.models.values()
        for key, value in [*flatten(model.flags).items(), *_pairs(model.args)]
        if _SECRET.search(key) and str(value)
    }
    return tuple(sorted(found, key=len, reverse=True))


def _pairs(args: tuple[str, ...]) -> Iterable[tuple[str, str]]:
    """Yield option and value of words as they are, `--a b` and `--a=b` alike."""
    for word in args:
        name, _, value = word.partition("=")
        yield name, value
    yield from itertools.pairwise(args)

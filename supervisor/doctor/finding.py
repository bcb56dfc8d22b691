"""The result of a check, and its redaction for publication."""

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

_HIDDEN: Final = "[hidden]"
# Options of llama-server that take a secret: --api-key, --hf-token, and similar later ones.
_SECRET: Final = re.compile(r"(?:^|[.-])(?:key|token|password|secret)$")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked, such as `engine` or `model chat`.
        level: `fail`: something will not work. `warn`: it works, but worse than it could.
        text: The result, without a full stop.
        fix: How to fix or improve it, if there is anything to do.
    """

    name: str
    level: Literal["ok", "warn", "fail"]
    text: str
    fix: str | None = None


def failed(name: str, error: CorralError) -> Finding:
    return Finding(name, "fail", error.message, error.hint)


def redact(finding: Finding, home: Path, secrets: Iterable[str]) -> Finding:
    """Replace the home directory by `~` and hide secrets."""

    def clean(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, _HIDDEN)
        return text.replace(str(home), "~") if home != Path(home.anchor) else text

    fix = finding.fix and clean(finding.fix)
    return replace(finding, name=clean(finding.name), text=clean(finding.text), fix=fix)


def secrets_of(settings: Settings) -> tuple[str, ...]:
    """Return the secret values in the settings, longest first."""
    found = {
        str(value)
        for model in settings.models.values()
        for key, value in [*flatten(model.flags).items(), *_pairs(model.args)]
        if _SECRET.search(key) and str(value)
    }
    return tuple(sorted(found, key=len, reverse=True))


def _pairs(args: tuple[str, ...]) -> Iterable[tuple[str, str]]:
    """Yield options with their values, written as `--a b` or `--a=b`."""
    for word in args:
        name, _, value = word.partition("=")
        yield name, value
    yield from itertools.pairwise(args)

"""A variant of a model: the same process under a name of its own, with other request members.

`chat:high` is the variant `high` of the model `chat`. What it says of a request changes the body
on its way to the instance and nothing else: no reload, no second cache. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

SEPARATOR: Final = ":"


@dataclass(frozen=True, slots=True)
class Variant:
    """What a variant makes of a request's members.

    Attributes:
        defaults: Members that count where the client gives none; of an object, the members that
            it does not give.
        forced: Members that count whatever the client gives.
        stripped: Members that are taken out.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    forced: Mapping[str, Any] = field(default_factory=dict)
    stripped: frozenset[str] = frozenset()

    def applied(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's members as this variant has them."""
        given = {key: value for key, value in members.items() if key not in self.stripped}
        filled = {key: _filled(value, given.get(key)) for key, value in self.defaults.items()}
        return {**given, **filled, **self.forced}


def _filled(default: Any, given: Any) -> Any:
    if given is None:
        return default
    if isinstance(default, Mapping) and isinstance(given, Mapping):
        return {**default, **given}
    return given

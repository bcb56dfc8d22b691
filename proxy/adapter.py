"""LoRA adapters of a model, chosen by name: `chat+legal` is the model `chat` with its adapter.

An engine has all adapters of a model loaded, and each request says how much of which it takes. It
must say so always: a slot that computed with one adapter keeps its cache for a request that says
nothing, and answers from it as if the adapter were on. Pure.

Source: measured on build 10434; llama.cpp, server-context.cpp, launch_slot_with_task: the cache is
cleared where the adapters of a request and of its slot differ, but only if the request names any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.errors import BadRequest

MARK: Final = "+"
MEMBER: Final = "lora"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter; `scale` is what `MODEL+NAME` means."""

    name: str
    scale: float = 1.0


Adapters = Sequence[Adapter]


def with_adapter(members: Mapping[str, Any], adapters: Adapters, name: str) -> dict[str, Any]:
    """Return a request's members with the scale of each adapter; `name` is empty for none.

    The id of an adapter is its place.

    Raises:
        BadRequest: The request gives scales of its own to a model name that has an adapter, or
            names an adapter that the model does not have.
    """
    given = members.get(MEMBER)
    if given and name:
        raise BadRequest(f"the model's name chooses the adapter {name}; leave out {MEMBER}")
    scales = [one.scale if one.name == name else 0.0 for one in adapters]
    return {**members, MEMBER: _filled(given, adapters) if given else _listed(scales)}


def check_fixed(members: Mapping[str, Any], model: str) -> None:
    """Refuse scales for a model whose instances apply an adapter to every request.

    Its engine finds prompts in main memory and in slot files by their tokens alone, whichever
    scales they were computed with; so another request would be answered from them.

    Raises:
        BadRequest: The request gives scales.
    """
    if members.get(MEMBER):
        raise BadRequest(
            f"{model} has one adapter for all requests: leave out {MEMBER}, or name "
            f"its adapters in [models.{model}.loras], where requests choose them"
        )


def names_of(adapters: Adapters) -> str:
    return ", ".join(one.name for one in adapters)


def _filled(given: object, adapters: Adapters) -> object:
    """Return scales for all adapters; what cannot be read is the engine's to refuse."""
    scales = [0.0] * len(adapters)
    for one in given if isinstance(given, list) else ():
        place = _place(one, adapters)
        scale = one.get("scale") if isinstance(one, dict) else None
        if place is None or isinstance(scale, bool) or not isinstance(scale, int | float):
            return given
        scales[place] = float(scale)
    return _listed(scales) if isinstance(given, list) else given


def _place(one: object, adapters: Adapters) -> int | None:
    """Return the place of an adapter that a request names by `name` or `id`."""
    if not isinstance(one, dict):
        return None
    if isinstance(name := one.get("name"), str):
        found = [at for at, adapter in enumerate(adapters) if adapter.name == name]
        if not found:
            raise BadRequest(f"the model has no adapter {name!r}; it has {names_of(adapters)}")
        return found[0]
    number = one.get("id")
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return number if 0 <= number < len(adapters) else None


def _listed(scales: Sequence[float]) -> list[dict[str, float]]:
    return [{"id": at, "scale": scale} for at, scale in enumerate(scales)]

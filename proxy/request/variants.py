"""Variants and adapters: `chat:high` sets other request members, `chat+legal` a LoRA adapter. Pure.

`chat:high` is the variant `high` of the model `chat`. It changes the body of a request on its way
to the instance and nothing else: no reload, no second cache.

An engine has all adapters of a model loaded, and each request gives their scales. It must always
give them: otherwise a slot that computed with an adapter keeps its cache for a request without
scales, and answers as if the adapter were on.

Source: measured on build 10434; llama.cpp, server-context.cpp, launch_slot_with_task: the cache is
cleared if the adapters of a request and of its slot differ, but only if the request names any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from proxy.cache.fingerprint import lora_of
from proxy.common.toml_types import Text, number
from proxy.errors import BadRequest

MARK: Final = "+"
MEMBER: Final = "lora"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter; `MODEL+NAME` applies it with `scale`."""

    name: str
    scale: float = 1.0


Adapters = Sequence[Adapter]


def with_adapter(members: Mapping[str, Any], adapters: Adapters, name: str) -> dict[str, Any]:
    """Return a request's members with the scale of each adapter; `name` is empty for none.

    The id of an adapter is its index.

    Raises:
        BadRequest: The request gives scales although its model name has an adapter, or names an
            unknown adapter.
    """
    given = members.get(MEMBER)
    if given and name:
        raise BadRequest(f"the model's name chooses the adapter {name}; leave out {MEMBER}")
    scales = [adapter.scale if adapter.name == name else 0.0 for adapter in adapters]
    return {**members, MEMBER: _complete_scales(given, adapters) if given else lora_of(scales)}


def check_fixed(members: Mapping[str, Any], model: str) -> None:
    """Refuse scales for a model whose instances apply an adapter to every request.

    Its engine finds prompts in main memory and in slot files by tokens alone, regardless of scales;
    so other requests would be answered from caches with the wrong scales.

    Raises BadRequest: the request gives scales.
    """
    if members.get(MEMBER):
        raise BadRequest(
            f"{model} has one adapter for all requests: leave out {MEMBER}, or name "
            "its adapters under loras of this model in corral.toml, where requests choose them"
        )


def _complete_scales(given: object, adapters: Adapters) -> object:
    scales = [0.0] * len(adapters)
    for adapter in given if isinstance(given, list) else ():
        place = _place(adapter, adapters)
        scale = adapter.get("scale") if isinstance(adapter, dict) else None
        if place is None or isinstance(scale, bool) or not isinstance(scale, int | float):
            return given
        scales[place] = float(scale)
    return lora_of(scales) if isinstance(given, list) else given


def _place(wanted: object, adapters: Adapters) -> int | None:
    if not isinstance(wanted, dict):
        return None
    if isinstance(name := wanted.get("name"), str):
        found = [at for at, adapter in enumerate(adapters) if adapter.name == name]
        if not found:
            names = ", ".join(adapter.name for adapter in adapters)
            raise BadRequest(f"the model has no adapter {name!r}; it has {names}")
        return found[0]
    number = wanted.get("id")
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return number if 0 <= number < len(adapters) else None


SEPARATOR: Final = ":"


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        for inner in value.values():
            _json_value(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _json_value(inner)
    elif isinstance(value, bool | int | float):
        number(value)
    elif not (value is None or isinstance(value, str)):
        raise ValueError(f"a {type(value).__name__} cannot be written as JSON")
    return value


class Variant(BaseModel):
    """`[models.NAME.variants.VARIANT]`: defaults for members that a request does not give.

    `set` and `strip` are not members.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    set: dict[str, Annotated[Any, AfterValidator(_json_value)]] = Field(default_factory=dict)
    """request members that replace the client's"""
    strip: tuple[Text, ...] = ()
    """request members that are removed"""

    @model_validator(mode="after")
    def _changes_something(self) -> Variant:
        _json_value(dict(self.defaults))
        members = {*self.defaults, *self.set}
        if not (members or self.strip):
            raise ValueError("it changes nothing; give it request members")
        if ours := sorted(members & {"id_slot", "model"}):
            raise ValueError(f"{ours[0]} cannot be set by a variant")
        return self

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Defaults for missing members, and for missing members of objects."""
        return self.model_extra or {}

    def apply_to(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Apply the variant to a request's members."""
        given = {key: value for key, value in members.items() if key not in self.strip}
        filled = {
            key: _merge_defaults(value, given.get(key)) for key, value in self.defaults.items()
        }
        return {**given, **filled, **self.set}


def _merge_defaults(default: Any, given: Any) -> Any:
    if given is None:
        return default
    if isinstance(default, Mapping) and isinstance(given, Mapping):
        return {**default, **given}
    return given

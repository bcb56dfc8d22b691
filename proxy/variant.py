"""A variant of a model: the same process under a name of its own, with other request members.

`chat:high` is the variant `high` of the model `chat`. It changes the body of a request on its way
to the instance and nothing else: no reload, no second cache. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from proxy.config.types import Text, number

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
    """`[models.NAME.variants.VARIANT]`: request members that count where a client gives none.

    The names `set` and `strip` are not members.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    set: dict[str, Annotated[Any, AfterValidator(_json_value)]] = Field(
        default_factory=dict, description="request members that count whatever the client gives"
    )
    strip: tuple[Text, ...] = Field((), description="request members that are taken out")

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
        """Members for requests without them; of an object, those that the client omits."""
        return self.model_extra or {}

    def applied(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's members as this variant has them."""
        given = {key: value for key, value in members.items() if key not in self.strip}
        filled = {key: _filled(value, given.get(key)) for key, value in self.defaults.items()}
        return {**given, **filled, **self.set}


def _filled(default: Any, given: Any) -> Any:
    if given is None:
        return default
    if isinstance(default, Mapping) and isinstance(given, Mapping):
        return {**default, **given}
    return given

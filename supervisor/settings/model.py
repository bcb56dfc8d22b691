"""The tables of a model: the GGUF and how to serve it, its variants, its restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from supervisor.settings.tables import Table
from supervisor.settings.types import (
    Alias,
    Argument,
    ExpandedPath,
    FlagName,
    FlagSetting,
    JsonValue,
    Text,
    VariantName,
    json_value,
)


class ModelRestartTable(Table):
    """`[models.NAME.restart]`: where one model differs from `[supervisor.restart]`."""

    backoff_initial_s: float | None = Field(
        None, gt=0, le=3600, description="as in [supervisor.restart], which stands where unset"
    )
    backoff_max_s: float | None = Field(None, gt=0, le=86_400, description="as backoff_initial_s")
    max_failures: int | None = Field(None, ge=1, le=1000, description="as backoff_initial_s")
    failure_half_life_s: float | None = Field(
        None, gt=0, le=604_800, description="as backoff_initial_s"
    )


class VariantTable(BaseModel):
    """`[models.NAME.variants.VARIANT]`: request members that count where a client gives none.

    Two names are not members but say more: `set` and `strip`.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    set: dict[str, JsonValue] = Field(
        default_factory=dict, description="request members that count whatever the client gives"
    )
    strip: tuple[Text, ...] = Field((), description="request members that are taken out")

    @model_validator(mode="after")
    def _changes_something(self) -> VariantTable:
        json_value(dict(self.defaults))
        members = {*self.defaults, *self.set}
        if not (members or self.strip):
            raise ValueError("a variant that changes nothing; give it request members")
        if ours := sorted(members & {"id_slot", "model"}):
            raise ValueError(f"{ours[0]} is not a variant's to say")
        return self

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Return the members that count where a client gives none."""
        return self.model_extra or {}


class ModelTable(Table):
    """`[models.NAME]`: a GGUF file and how to serve it."""

    path: ExpandedPath = Field(description="the GGUF file; of a split model, its first shard")
    profile: Text = Field("base", description="a profile of `corral profile list`")
    replicas: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        1, description="processes that serve this model; auto: as many as pay on this machine"
    )
    draft: Literal["auto"] | ExpandedPath | None = Field(
        None,
        description="a smaller GGUF of the same vocabulary, for speculation; "
        "auto: one beside the model, where there is one",
    )
    aliases: tuple[Alias, ...] = Field((), description="other names that clients may use")
    variants: dict[VariantName, VariantTable] = Field(
        default_factory=dict,
        description="the same processes under NAME:VARIANT, with other request defaults",
    )
    preload: bool = Field(
        default=True, description="whether it comes up with the daemon, or when first called"
    )
    pinned: bool = Field(default=False, description="whether it never leaves for another model")
    ttl_s: float = Field(
        0, ge=0, le=31_536_000, description="unload after this long without a request; 0 for never"
    )
    min_residency_s: float = Field(
        2, ge=0, le=86_400, description="how long it stays at least before it leaves for another"
    )
    flags: dict[FlagName, FlagSetting] = Field(
        default_factory=dict, description="llama-server's own long names; they win over the profile"
    )
    args: tuple[Argument, ...] = Field(
        (), description="passed to llama-server as they are, unchecked, last"
    )
    warm_prompts: tuple[ExpandedPath, ...] = Field(
        (),
        max_length=16,
        description="files read ahead after each start: system prompts, or chat requests in .json",
    )
    learn_prompts: bool = Field(
        default=False,
        description="keep what conversations begin with, and read it ahead after warm_prompts",
    )
    restart: ModelRestartTable = ModelRestartTable()

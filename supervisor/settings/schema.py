"""Every table of `corral.toml`; most are declared by the package that uses them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from proxy.nodes.settings import NodeSettings
from proxy.setting_types import ExpandedPath, SettingsTable, Text
from proxy.settings import ProxySettings
from proxy.variant import Variant
from supervisor.flags.setting import Argument, FlagName, FlagSetting
from supervisor.instance.backoff import RestartPolicy
from supervisor.instance.limits import InstanceLimits
from supervisor.settings.types import Alias, Bytes, ModelName, NodeName, VariantName


class EvictionSettings(SettingsTable):
    """When all models make room for others."""

    eviction_wait_s: float = Field(
        20,
        ge=0,
        le=86_400,
        description="how long requests for a model that is not loaded wait for others to fall idle "
        "before those are given nothing new",
    )
    abandon_load_below: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of a load below which it is given up when nobody waits for it any more "
        "and another model needs the memory",
    )


class ResidencyPolicy(SettingsTable):
    """When one model enters and leaves memory."""

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


class SupervisorSettings(InstanceLimits, EvictionSettings):
    """`[supervisor]`: limits of the instances' states, memory, eviction and slot files."""

    watch_settings: bool = Field(
        default=False, description="reload when this file changes; it is looked at every 2 s"
    )
    memory_budget: Annotated[Bytes, Field(ge=1024**2, le=2**60)] | None = Field(
        None,
        description="main memory that all models together may take, in bytes or as in 12 GiB; "
        "unset: all but a twentieth",
    )
    persist_slots: bool = Field(
        default=True,
        description="keep conversations on the disk while their model is away, for this user only",
    )
    slots_disk_budget: Annotated[Bytes, Field(ge=1024**2, le=2**60)] = Field(
        8 * 1024**3, description="disk that kept conversations may take, in bytes or as in 8 GiB"
    )
    slot_save_timeout_s: float = Field(
        10, gt=0, le=3600, description="time an instance may take to save its conversations"
    )
    restart: RestartPolicy = RestartPolicy()


class ModelSettings(ResidencyPolicy):
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
    variants: dict[VariantName, Variant] = Field(
        default_factory=dict,
        description="the same processes under NAME:VARIANT, with other request defaults",
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
    restart: RestartPolicy = Field(
        RestartPolicy(), description="keys that differ from [supervisor.restart]"
    )


class Settings(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="CORRAL_", env_nested_delimiter="__"
    )

    engine: ExpandedPath | None = Field(
        None, description="path of llama-server; unset: vendor/, the installed package, PATH"
    )
    proxy: ProxySettings = ProxySettings()
    supervisor: SupervisorSettings = SupervisorSettings()
    models: dict[ModelName, ModelSettings] = Field(
        default_factory=dict, description="the models, by the name clients use"
    )
    nodes: dict[NodeName, NodeSettings] = Field(
        default_factory=dict, description="other machines whose models are served too"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 (pydantic-settings names the parameters)
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (as above)
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (as above)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (as above)
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the one source: load() merges the others itself, to tell their origins."""
        return (init_settings,)

    def restart_policy(self, model: str) -> RestartPolicy:
        """Return `[supervisor.restart]` with the keys that a model sets itself."""
        own = self.models[model].restart.model_dump(exclude_unset=True)
        return self.supervisor.restart.model_copy(update=own)

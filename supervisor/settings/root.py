"""All tables together."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from supervisor.settings.model import ModelTable
from supervisor.settings.tables import NodeTable, ProxyTable, SupervisorTable
from supervisor.settings.types import ExpandedPath, ModelName, NodeName


class Settings(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="CORRAL_", env_nested_delimiter="__"
    )

    engine: ExpandedPath | None = Field(
        None, description="path of llama-server; unset: vendor/, the installed package, PATH"
    )
    proxy: ProxyTable = ProxyTable()
    supervisor: SupervisorTable = SupervisorTable()
    models: dict[ModelName, ModelTable] = Field(
        default_factory=dict, description="the models, by the name clients use"
    )
    nodes: dict[NodeName, NodeTable] = Field(
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

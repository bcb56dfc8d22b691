"""Declares the whole of `corral.toml`; many tables come from the packages that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from proxy.common.toml_types import ExpandedPath, SettingsTable, Text
from proxy.nodes.settings import NodeSettings
from proxy.request.variants import Variant
from proxy.settings import JobSettings, ProxySettings
from supervisor.builds.installed import EngineField
from supervisor.plan.loras import LORAS_MAX, LoraSetting, conflict
from supervisor.plan.plan import TrialSettings
from supervisor.plan.resolve import BatchingSettings
from supervisor.plan.setting import Argument, FlagName, FlagSetting
from supervisor.settings import tables
from supervisor.settings.groups import Groups, GroupSettings


class EvictionSettings(SettingsTable):
    """When all models make room for others."""

    eviction_wait_s: float = Field(20, ge=0, le=86_400)
    """how long a requested model waits for others to become idle before they are drained"""
    abandon_load_below: float = Field(0.5, ge=0, le=1)
    """share of a load below which it is abandoned when no request waits for it and another model
    needs the memory"""


class ResidencyPolicy(SettingsTable):
    """When one model enters and leaves memory."""

    preload: bool = True
    """load it when the daemon starts, not with its first request"""
    pinned: bool = False
    """never unload it for another model"""
    ttl_s: Annotated[tables.Seconds, Field(ge=0, le=31_536_000)] = 0
    """unload after this long without a request, in seconds or as in 15m; 0 for never"""
    keep_alive: bool = True
    """whether requests may change how long it stays, by the member keep_alive"""
    keep_alive_max_s: Annotated[tables.Seconds, Field(ge=0, le=31_536_000)] | None = None
    """longest time that keep_alive may set; it also limits -1 (no limit); unset: any"""
    min_residency_s: float = Field(2, ge=0, le=86_400)
    """shortest time that it stays loaded before it is unloaded for another model"""


class SupervisorSettings(tables.InstanceLimits, EvictionSettings):
    """`[supervisor]`: limits of the instances' states, memory, eviction and slot files."""

    watch_settings: bool = False
    """reload when this file changes, which is checked every 2 s"""
    memory_budget: Annotated[tables.Bytes, Field(ge=1024**2, le=2**60)] | None = None
    """main memory that all models together may take, in bytes or as in 12 GiB; unset: 95 % of it"""
    device_memory_wait_s: float = Field(5, ge=0, le=600)
    """how long a load waits for device memory that an engine has not released yet after its end"""
    measure_threads: bool = True
    """measure models of up to 1 GiB with several thread counts at their first start"""
    adaptive: bool = True
    """while serving, adapt auto values to demand and machine, and drafting to its measured speed;
    false: change nothing"""
    persist_slots: bool = True
    """save conversations to disk, for this user alone, while their model is not loaded"""
    slots_disk_budget: Literal["auto"] | Annotated[tables.Bytes, Field(ge=1024**2, le=2**60)] = (
        "auto"
    )
    """disk space for saved conversations, in bytes or as in 8 GiB; auto: a quarter of the free room
    of their file system, 1 GiB to 256 GiB"""
    slots_directory: ExpandedPath | None = None
    """directory for saved conversations that daemons on several machines share, on a network file
    system for instance; unset: slots/ of the data directory, for this daemon alone"""
    slots_key_file: ExpandedPath | None = None
    """file with the keys that encrypt saved conversations, as `corral slots new-key` makes it;
    unset: they are not encrypted"""
    slots_max_age_days: float = Field(30, gt=0, le=36_500)
    """saved conversations that were unused for so many days are deleted"""
    slots_write_budget: Annotated[tables.Bytes, Field(ge=0, le=2**60)] = 32 * 1024**3
    """conversations written to disk in an hour while their model serves, in bytes or as in 32 GiB;
    0: they are saved only when their model is unloaded"""
    slots_send_rate: Annotated[tables.Bytes, Field(ge=0, le=2**60)] = 1024**3
    """bytes per second of saved conversations that other machines may copy from here, all copies
    together, in bytes or as in 100 MiB; 0: none"""
    slots_hand_over_s: float = Field(20, ge=0, le=3600)
    """how long a stopping daemon waits for nodes to copy its saved conversations; 0: it offers
    none"""
    record_requests: bool = True
    """record sizes and pauses of answered requests, never a text, for this user alone; `corral
    bench --workload yours` replays them"""
    record_usage: bool = True
    """record tokens and seconds per API key, model and day, never a text, for this user alone;
    `corral usage` shows them"""
    slot_save_timeout_s: float = Field(60, gt=0, le=3600)
    """time for an instance to save its conversations"""
    restart: tables.RestartPolicy = tables.RestartPolicy()


class ModelSettings(ResidencyPolicy):
    """`[models.NAME]`: a GGUF file and how to serve it."""

    path: tables.ModelPath
    """the GGUF file (of a split model, its first shard); or hf:OWNER/NAME:QUANT,
    hf:OWNER/NAME:FILE.gguf or ollama:NAME:TAG, which is looked up in all stores"""
    engine: EngineField | None = None
    """its own installed build or llama-server; unset: the engine of all models"""
    profile: Text = "base"
    """a profile of `corral profile list`"""
    replicas: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 1
    """processes that serve this model; auto: as many as are useful on this machine"""
    draft: Literal["auto"] | tables.ModelPath | None = None
    """a smaller GGUF of the same vocabulary, for speculation: a file, or a reference as for path;
    auto: a draft in the model's directory, if there is one"""
    aliases: tuple[tables.Alias, ...] = ()
    """other names that clients may use; * stands for all that no model has"""
    fallback: tuple[Text, ...] = Field((), max_length=8)
    """models, aliases or variants that answer chats while this model cannot be served; the first
    available one answers"""
    tool_calls: Literal["pass", "repair"] = "pass"
    """repair: calls of tools are checked against the schemas of their request, and broken ones are
    repaired or generated again"""
    tool_call_retries: int = Field(2, ge=0, le=8)
    """how often one broken call is generated again, at most"""
    variants: dict[tables.VariantName, Variant] = Field(default_factory=dict)
    """the same processes under NAME:VARIANT, with other request defaults"""
    flags: dict[FlagName, FlagSetting] = Field(default_factory=dict)
    """llama-server's own long names; they override the profile"""
    args: tuple[Argument, ...] = ()
    """passed to llama-server last, unchecked"""
    engine_tools: bool = False
    """flags may have llama-server run tools and MCP servers, as the daemon's user, for API keys
    with tools = true; without keys, for programs of this machine"""
    loras: dict[tables.VariantName, LoraSetting] = Field(default_factory=dict, max_length=LORAS_MAX)
    """LoRA adapters: the GGUF of each, or { path = FILE, scale = NUMBER }; requests choose one by
    the model name MODEL+NAME"""
    warm_prompts: tuple[ExpandedPath, ...] = Field((), max_length=16)
    """files to prefill after each start: system prompts, or chat requests in .json"""
    learn_prompts: bool = False
    """save prefixes that conversations share, and prefill them after warm_prompts"""
    batching: BatchingSettings = BatchingSettings()
    slots: tables.SlotSettings = tables.SlotSettings()
    restart: tables.RestartPolicy = tables.RestartPolicy()
    """keys that differ from [supervisor.restart]"""
    trial: TrialSettings | None = None
    """another profile or engine, on one more replica, for a share of conversations"""
    workers: tuple[tables.WorkerName, ...] = Field((), max_length=16)
    """names of [workers] that compute its layers, in this order"""
    on_worker_loss: Literal["wait", "without"] = "wait"
    """while one of them does not answer: wait for it, or run without it"""

    on_out_of_memory: Literal["reduce", "fail"] = "reduce"
    """after its engine ran out of memory while it loaded: start it with a shorter context, then a
    quantised KV cache, then fewer layers on devices, each once and never a value of
    this table; or fail"""

    @property
    def fixed_adapter_option(self) -> str | None:
        """The option that applies adapters to every request, or None."""
        return conflict({**self.flags, **(self.trial.flags if self.trial else {})}, self.args)

    @property
    def lets_clients_choose_runtime(self) -> bool:
        """Whether a client may name the runtime of a tool: it may run any command here anyway."""
        options = {name.lstrip("-"): str(value) for name, value in self.flags.items()}
        tools = options.get("tools", "").split(",")
        is_fixed = "tools-runtime" in options or any("tools-runtime" in word for word in self.args)
        return self.engine_tools and not is_fixed and bool({"all", "exec_shell_command"} & {*tools})

    @model_validator(mode="after")
    def _has_one_source_of_adapters(self) -> Self:
        if self.loras and (option := self.fixed_adapter_option):
            raise ValueError(f"loras and the option {option} both load adapters; keep loras")
        return self

    @model_validator(mode="after")
    def _has_workers_of_its_own(self) -> Self:
        if len(set(self.workers)) < len(self.workers):
            raise ValueError("workers names one twice")
        if self.workers and (self.replicas != 1 or self.trial):
            raise ValueError(
                "with workers there is one replica and no trial: a worker serves one engine at a "
                "time"
            )
        return self


class FoundModel(ModelSettings):
    """A model without a table, whose file `serve_found` found."""

    preload: bool = False


class Settings(BaseModel):
    """All settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    engine: EngineField | None = None
    """an installed build such as b10434, or the path of llama-server or of llama.cpp's llama;
    unset: the build of `corral engine use`, vendor/, the installed package, PATH"""
    proxy: ProxySettings = ProxySettings()
    supervisor: SupervisorSettings = SupervisorSettings()
    devices: tables.DeviceSettings = tables.DeviceSettings()
    balance: tables.BalanceSettings = tables.BalanceSettings()
    jobs: JobSettings = JobSettings()
    releases: tables.ReleaseSettings = tables.ReleaseSettings()
    history: tables.HistorySettings = tables.HistorySettings()
    hooks: tables.HookSettings = tables.HookSettings()
    models: dict[tables.ModelName, ModelSettings] = Field(default_factory=dict)
    """the models, by the name clients use"""
    models_dir: tuple[ExpandedPath, ...] | ExpandedPath = ()
    """directories with GGUF files, one or several; `corral model list` shows their files"""
    serve_found: bool = False
    """serve all models of `corral model list` by name, each loaded by its first request"""
    groups: dict[tables.GroupName, GroupSettings] = Field(default_factory=dict)
    """which models may be loaded at the same time"""
    nodes: dict[tables.NodeName, NodeSettings] = Field(default_factory=dict)
    """other machines whose models are served too"""
    workers: dict[tables.WorkerName, tables.WorkerSettings] = Field(default_factory=dict)
    """RPC servers that compute layers for models here"""

    @property
    def models_dirs(self) -> tuple[Path, ...]:
        return self.models_dir if isinstance(self.models_dir, tuple) else (self.models_dir,)

    @property
    def group_rules(self) -> Groups:
        pinned = frozenset(name for name, model in self.models.items() if model.pinned)
        return Groups(self.groups, pinned)

    def is_recorded(self, model: str) -> bool:
        """Return whether the sizes of a model's requests are recorded."""
        return self.supervisor.record_requests and model in self.models

    def restart_policy(self, model: str) -> tables.RestartPolicy:
        """Return `[supervisor.restart]` with the keys that a model sets itself."""
        own = self.models[model].restart.model_dump(exclude_unset=True)
        return self.supervisor.restart.model_copy(update=own)

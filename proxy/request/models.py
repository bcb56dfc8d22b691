"""The proxy's interfaces to the supervisor: the models, and operations on them.

Model names and their resolution; loading and unloading; prefilling prompts; the use of GPUs; the
properties of a model in Ollama's API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Final, Literal, Protocol

from aiohttp import web

from proxy.auth.api_keys import KEY
from proxy.auth.keys_file import Key
from proxy.cache.prompt_rules import PromptRules
from proxy.cache.shared_prefixes import SharedPrefix
from proxy.common.headers import HOP
from proxy.errors import BadRequest, QueueTimeout, UnknownModel, known_models
from proxy.observe.record import LoadCause
from proxy.request.variants import MARK, SEPARATOR, Adapter, Variant

# Each API key may allow its own set of models.
_SUBSETS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as clients may see it."""

    id: str
    aliases: tuple[str, ...]
    # A request loads an `unloaded` model; `failed` needs an operator.
    state: Literal["loaded", "loading", "unloaded", "failed"]
    created: int  # Unix time in whole seconds, constant for the life of the model's entry.
    context_length: int | None  # Tokens that one request may use; None if not yet known.
    slots: int  # Slots of all instances; 0 if not yet known.
    reason: str | None = None  # Why it failed, now or before the current load, or None.
    variants: Mapping[str, Variant] = field(default_factory=dict)
    remote_variants: tuple[str, ...] = ()
    variant_of: str | None = None  # For variants in a list of models: the base model.
    is_local: bool = True
    # The model without other machines, if they make a difference.
    local_only: ModelInfo | None = None
    is_catch_all: bool = False  # Whether all unknown names mean this model.
    # Members `meta` of llama-server's `/v1/models`, as far as known.
    meta: Mapping[str, int | str] = field(default_factory=dict)
    input_modalities: tuple[str, ...] = ("text",)  # Its input types, in llama-server's terms.
    fallback: tuple[str, ...] = ()  # Names of the models that may answer in its place, in order.
    repairs_tool_calls: bool = False  # Unless the request says otherwise.
    tool_call_retries: int = 2  # How often a broken call is generated again, at most.
    engine_tools: bool = False  # Whether clients may use the tools that its engines run.
    chooses_tool_runtime: bool = False  # Whether a request may say where a tool runs.
    is_loadable: bool = False  # Whether it is not loaded but would be loaded for another machine.
    load_progress: float | None = None  # 0 to 1 while it loads; None otherwise or if unknown.
    # LoRA adapters of its local instances, in the order of their ids.
    adapters: tuple[Adapter, ...] = ()
    # Whether its instances apply adapters to every request, by `--lora`.
    has_fixed_adapters: bool = False
    # Adapters that a client must use one of; None if it may use the model without.
    only: frozenset[str] | None = None

    def limit_to(self, models: frozenset[str]) -> ModelInfo | None:
        """Return the model as seen by a client that may use these names; None otherwise."""
        names = (self.id, *self.aliases)
        if not models.isdisjoint(names):
            return self
        if not self.adapters:
            return None
        only = frozenset(
            adapter.name
            for adapter in self.adapters
            if not models.isdisjoint(f"{name}{MARK}{adapter.name}" for name in names)
        )
        return replace(self, only=only, is_catch_all=False) if only else None

    @property
    def own_names(self) -> tuple[str, ...]:
        return (self.id, *self.aliases) if self.only is None else ()

    @property
    def usable_adapters(self) -> tuple[Adapter, ...]:
        return tuple(
            adapter for adapter in self.adapters if self.only is None or adapter.name in self.only
        )


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model and variant that a name means."""

    model_info: ModelInfo
    variant: Variant | None = None
    remote_variant: str = ""  # Name of a variant that another machine applies; empty for none.
    adapter: str = ""


class ModelNames:
    """All names of a set of models: ids and aliases, alone and with a variant behind.

    `chat:high` is the variant `high` of the model `chat`; a model of exactly that name has
    priority. `default` is the name for requests without one, if it is one of these. The states of
    the models are those at construction.
    """

    def __init__(
        self,
        model_infos: Iterable[ModelInfo],
        default: str | None = None,
        prompt_rules: PromptRules | None = None,
    ) -> None:
        self.model_infos = tuple(model_infos)
        self.prompt_rules = prompt_rules
        self.default = default
        self._catch_all = next((info for info in self.model_infos if info.is_catch_all), None)
        self._by_name: dict[str, ResolvedModel] = {}
        self._visible: dict[frozenset[str], ModelNames] = {}
        for info in self.model_infos:
            for name in info.own_names:
                self._by_name.setdefault(name, ResolvedModel(info))
        for info in self.model_infos:
            for name in info.own_names:
                if self._by_name[name].model_info is info:
                    self._add_variants(name, ResolvedModel(info))
            for name, adapter in product((info.id, *info.aliases), info.usable_adapters):
                taken = self._by_name.get(name)
                full_name = f"{name}{MARK}{adapter.name}"
                if (taken is None or taken.model_info is info) and full_name not in self._by_name:
                    found = self._by_name[full_name] = ResolvedModel(info, adapter=adapter.name)
                    self._add_variants(full_name, found)

    def _add_variants(self, name: str, base: ResolvedModel) -> None:
        for variant, members in base.model_info.variants.items():
            self._by_name.setdefault(f"{name}{SEPARATOR}{variant}", replace(base, variant=members))
        for variant in () if base.adapter else base.model_info.remote_variants:
            found = replace(base, remote_variant=variant)
            self._by_name.setdefault(name + variant_end(variant), found)

    def resolve(self, name: str | None) -> ResolvedModel:
        """Return the model that a name means.

        No name means the default model, or the only one, or the catch-all.

        Raises:
            BadRequest: No name was given, and there are several models.
            UnknownModel: No model has that name.
        """
        if found := self._by_name.get(name or self.default or ""):
            return found
        if not name and len(self.model_infos) == 1 and self.model_infos[0].only is None:
            return ResolvedModel(self.model_infos[0])
        if self._catch_all:
            return ResolvedModel(self._catch_all)
        if name:
            raise UnknownModel(name, self._ids())
        raise BadRequest(f"the request names no model ({known_models(self._ids())})")

    def get(self, name: str) -> ResolvedModel | None:
        return self._by_name.get(name)

    @cached_property
    def local(self) -> ModelNames:
        """The names of this machine's models, without a catch-all."""
        infos = without_nodes(self.model_infos)
        own = (replace(info, is_catch_all=False) for info in infos)
        return ModelNames(own, self.default, self.prompt_rules)

    def visible(self, models: frozenset[str] | None) -> ModelNames:
        """Return the names of the models that a client may use; `models` is None for all."""
        if models is None:
            return self
        if models not in self._visible:
            if len(self._visible) >= _SUBSETS_MAX:
                self._visible.clear()
            limited = (info.limit_to(models) for info in self.model_infos)
            infos = [info for info in limited if info]
            self._visible[models] = ModelNames(infos, self.default, self.prompt_rules)
        return self._visible[models]

    def _ids(self) -> list[str]:
        return [entry.id for entry in with_variants(self.model_infos)]


def without_nodes(model_infos: Iterable[ModelInfo]) -> list[ModelInfo]:
    """Return the models of this machine, as it serves them without nodes."""
    return [info.local_only or info for info in model_infos if info.is_local]


def with_variants(model_infos: Iterable[ModelInfo]) -> list[ModelInfo]:
    """Return the models, each followed by its adapters and variants as separate models."""
    return [
        entry
        for info in model_infos
        for entry in (*((info,) if info.only is None else ()), *_variants(info))
    ]


def variant_end(variant: str) -> str:
    """Return the suffix of a variant's name; another machine's adapter already has its mark."""
    return variant if variant.startswith(MARK) else SEPARATOR + variant


def _variants(model_info: ModelInfo) -> Iterator[ModelInfo]:
    ends = [MARK + adapter.name for adapter in model_info.usable_adapters]
    if model_info.only is None:
        ends += map(variant_end, (*model_info.variants, *model_info.remote_variants))
    for end in ends:
        yield replace(
            model_info,
            id=model_info.id + end,
            aliases=tuple(alias + end for alias in model_info.aliases),
            variants={},
            remote_variants=(),
            variant_of=model_info.id,
            is_catch_all=False,
            adapters=(),
            only=None,
        )


OnLoad = Callable[[], None]


def do_nothing_on_load() -> None:
    """An `OnLoad` that does nothing."""


class ModelLoader(Protocol):
    def models(self) -> Sequence[ModelInfo]:
        """Return every configured model, in the order of the settings."""

    def names(self) -> ModelNames:
        """Return the names of all models; the same object until a model changes."""

    async def ensure_ready(
        self, model: str, on_load: OnLoad = do_nothing_on_load
    ) -> LoadCause | None:
        """Wait until an instance of the model is admitted; the caller sets the deadline.

        `on_load` is called when its load begins, after any wait for memory. Returns what is known
        of the reason for the load.

        Raises ProxyError: no instance will be: Unavailable, UnknownModel or UpstreamFailed.
        """


async def load_in_time(loader: ModelLoader, model: str, limit_s: float) -> None:
    """Wait until a model is loaded; raises QueueTimeout, and as `ModelLoader.ensure_ready`."""
    try:
        async with asyncio.timeout(limit_s):
            await loader.ensure_ready(model)
    except TimeoutError as error:
        message = f"timed out after {limit_s:g} s waiting for {model} to load; retry later"
        raise QueueTimeout(message) from error


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A model's use of GPUs."""

    layers: int = 0  # Layers on GPUs of the instance with the most; the output counts as one.
    memory_bytes: int = 0
    devices: tuple[str, ...] = ()


class EngineReader(Protocol):
    def gpu_use(self, model: str, /) -> GpuUse:
        """Return the GPU use of a model's ready instances."""

    async def runtime(self) -> Mapping[str, object]:
        """Return the engine's format, name, version and abilities.

        Raises Unavailable: no engine is running.
        """


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prompt that an instance prefilled; `tokens` were not cached."""

    instance: str
    tokens: int
    cached_tokens: int

    def with_cached(self, most: int) -> PrefillResult:
        hidden = max(0, self.cached_tokens - most)
        return PrefillResult(self.instance, self.tokens + hidden, self.cached_tokens - hidden)


class PromptWarmer(Protocol):
    """Prefills prompts, and remembers prompts to prefill at the next start."""

    def learns(self, model: str, /) -> bool:
        """Return whether shared prefixes of a model's conversations are remembered."""

    def learn(self, model: str, prefix: SharedPrefix, /) -> None:
        """Note a prefix that three more conversations of a model share; must not block."""

    async def warm(self, model: str, body: Mapping[str, Any], /) -> Sequence[PrefillResult]:
        """Prefill a chat request on all ready instances of a model; clients come first.

        Raises:
            BadRequest: The body is no chat request, or an instance refused it.
            Unavailable: No instance is ready, or one had no free slot.
        """


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """Metadata of a model's file."""

    architecture: str = ""  # GGUF's name of the architecture, such as `llama`.
    chat_template: str = ""
    capabilities: tuple[str, ...] = ("completion",)


@dataclass(frozen=True, slots=True)
class Residence:
    """Memory and remaining time of a loaded model."""

    memory_bytes: int = 0
    gpu_bytes: int = 0
    # Time until it is unloaded if no request comes; None for never.
    unload_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A step of a download; `total_bytes` is 0 if it has no size."""

    status: str
    file: str = ""
    total_bytes: int = 0
    completed_bytes: int = 0


class OllamaHost(Protocol):
    """All names are names of configured models, except in `pull`."""

    async def details(self, models: Sequence[str], /) -> Mapping[str, ModelDetails]:
        """Return the details of all models whose files can be read."""

    def residence(self, model: str, /) -> Residence:
        """Return the residence of a model, loaded or not."""

    def keep_alive(self, model: str, seconds: float, /) -> None:
        """Set how long a loaded model stays loaded without requests."""

    def pull(self, name: str, /) -> AsyncGenerator[Progress, None]:
        """Download a model; stops if the iteration is cancelled.

        Raises ProxyError: no such model, no space, or the download failed.
        """

    async def delete(self, model: str, /) -> None:
        """Remove the files of a model. Raises ProxyError: the files cannot be removed."""


class ModelControl(Protocol):
    """Loads and unloads models of this machine, without waiting for the end."""

    def load(self, model: str, /) -> None:
        """Begin to load a model.

        Raises:
            Unavailable: A command stopped it.
            UnknownModel: It is no longer configured.
        """

    async def load_for_others(self, model: str, /) -> None:
        """Begin to load a model for another llama-corral, unless a model in use would have to go.

        Raises:
            Unavailable: It was stopped or failed, or there is no memory for it.
            UnknownModel: It is no longer configured.
        """

    def unload(self, model: str, /) -> None:
        """Begin to unload a model: its requests finish first, and the next request loads it again.

        Raises UnknownModel: it is no longer configured.
        """

    def changes(self) -> AbstractContextManager[asyncio.Event]:
        """Return an event that is set at each change of a model's state or load progress."""


def client_models(loader: ModelLoader, request: web.BaseRequest) -> Sequence[ModelInfo]:
    """Return the models that the client may see; for another proxy, without nodes."""
    model_infos = loader.models()
    if HOP in request.headers:
        model_infos = without_nodes(model_infos)
    return visible_models(model_infos, request[KEY])


def client_names(loader: ModelLoader, request: web.BaseRequest) -> ModelNames:
    """Return the model names that the client may use; for another proxy, without nodes."""
    names, key = loader.names(), request[KEY]
    if HOP in request.headers:
        names = names.local
    return names.visible(key.models) if key and key.models is not None else names


def visible_models(model_infos: Sequence[ModelInfo], key: Key | None) -> Sequence[ModelInfo]:
    if key is None or key.models is None:
        return model_infos
    return [found for model in model_infos if (found := model.limit_to(key.models))]

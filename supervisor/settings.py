"""`corral.toml`, the environment and the command line, as one frozen value.

Later wins: defaults, the file, the environment (`CORRAL_PROXY__LISTEN`), the command line. The file
is the first found of `--config`, `CORRAL_CONFIG`, `./corral.toml` and `corral.toml` in the user's
config directory. An unknown key is an error that names the nearest one. Model names are checked
here, once: what passes is safe as part of a file name.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from supervisor.errors import SettingsInvalid

FILE_NAME: Final = "corral.toml"
_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,63}")
_VARIANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(KiB|MiB|GiB|TiB)")
_UNITS: Final = {"KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+/-]{0,127}")


def _checked(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(name: str) -> str:
        if not pattern.fullmatch(name):
            raise ValueError(f"not {what}: letters, digits and . _ : @ + - only")
        return name

    return AfterValidator(check)


ExpandedPath = Annotated[Path, AfterValidator(Path.expanduser)]
ModelName = Annotated[str, _checked(_MODEL_NAME, "a model name")]
Alias = Annotated[str, _checked(_ALIAS, "an alias")]
VariantName = Annotated[str, _checked(_VARIANT, "a variant's name")]
NodeName = Annotated[str, _checked(_VARIANT, "a node's name")]
FlagSetting = bool | int | float | str


def _address(listen: str) -> str:
    host, separator, port = listen.rpartition(":")
    if not (host and separator and port.isdecimal() and int(port) <= 65535):
        raise ValueError("not HOST:PORT")
    return listen


def _bytes(amount: object) -> object:
    """Return bytes for a text such as `12 GiB`; anything else as it is."""
    found = _SIZE.fullmatch(amount) if isinstance(amount, str) else None
    return int(float(found[1]) * 1024 ** _UNITS[found[2]]) if found else amount


def _address_of_node(url: str) -> str:
    """Return where a node's pages are, without the `/v1` that clients want behind it."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("not http://HOST:PORT or https://HOST:PORT")
    if "@" in parts.netloc or parts.query or parts.fragment or not url.isprintable():
        raise ValueError("more than an address; a key belongs into key_file")
    if parts.port == 0:  # to read it refuses whatever else is no port
        raise ValueError("not a port")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProxyTable(_Table):
    """`[proxy]`: where clients connect, and what they may send."""

    listen: Annotated[str, AfterValidator(_address)] = Field(
        "127.0.0.1:8080", description="HOST:PORT that clients connect to; port 0 takes any free one"
    )
    max_body_bytes: int = Field(
        64 * 1024**2, ge=1024, le=4 * 1024**3, description="largest request body taken, in bytes"
    )
    connect_timeout_s: float = Field(
        5, gt=0, le=60, description="seconds to wait for an engine to accept a connection"
    )
    silence_timeout_s: float = Field(
        3600,
        gt=0,
        le=86_400,
        description="seconds an engine may send nothing before its answer is given up",
    )
    head_timeout_s: float = Field(
        20, gt=0, le=3600, description="seconds a client may take to send a request's header"
    )
    body_timeout_s: float = Field(
        300, gt=0, le=86_400, description="seconds a client may take to send a request's body"
    )
    unread_timeout_s: float = Field(
        120,
        ge=1,
        le=86_400,
        description="seconds a client may take nothing of what is sent to it before it is cut",
    )
    line_max: int = Field(
        128, ge=0, le=100_000, description="requests that may wait for one model; more get 429"
    )
    patience_s: float = Field(
        120,
        ge=0,
        le=86_400,
        description="seconds a request may wait for its turn or for its model to load",
    )
    policy: Literal["affinity", "least-busy", "round-robin"] = Field(
        "affinity",
        description="which engine is asked: affinity (the one that holds the conversation), "
        "least-busy or round-robin",
    )
    index_max: int = Field(
        200_000, ge=1, le=100_000_000, description="blocks of prompts remembered for affinity"
    )
    keys_file: ExpandedPath | None = Field(
        None, description="TOML file of API keys that are taken; unset: anybody may ask"
    )
    origins: tuple[str, ...] = Field(
        (),
        description="origins whose web pages may ask, besides the local ones; "
        "one * may stand in the host, as in https://*.example.com",
    )
    hosts: tuple[str, ...] = Field(
        (),
        description="names of this machine taken in Host, besides localhost; "
        "where set, Host is checked on any address",
    )


class RestartTable(_Table):
    """`[supervisor.restart]`: how patiently instances are tried again after a fault."""

    base_s: float = Field(
        0.5, gt=0, le=3600, description="longest wait after the first fault; doubles with each"
    )
    cap_s: float = Field(60, gt=0, le=86_400, description="longest wait ever")
    breaker: int = Field(
        5, ge=1, le=1000, description="faults close together after which it is given up"
    )
    half_life_s: float = Field(
        300, gt=0, le=604_800, description="time in which the memory of faults halves"
    )


class ModelRestartTable(_Table):
    """`[models.NAME.restart]`: where one model differs from `[supervisor.restart]`."""

    base_s: float | None = Field(
        None, gt=0, le=3600, description="as in [supervisor.restart], which stands where unset"
    )
    cap_s: float | None = Field(None, gt=0, le=86_400, description="as base_s")
    breaker: int | None = Field(None, ge=1, le=1000, description="as base_s")
    half_life_s: float | None = Field(None, gt=0, le=604_800, description="as base_s")


class SupervisorTable(_Table):
    """`[supervisor]`: how long each phase of an instance's life may take, in seconds."""

    watch_settings: bool = Field(
        default=False, description="reload when this file changes; it is looked at every 2 s"
    )

    load_timeout_s: float = Field(
        300,
        gt=0,
        le=86_400,
        description="silence allowed while loading, since the engine's last sign of life",
    )
    warm_timeout_s: float = Field(
        30, gt=0, le=3600, description="time allowed for the warm-up request"
    )
    unwell_timeout_s: float = Field(
        60,
        gt=0,
        le=3600,
        description="time to answer again before it is restarted; less while clients wait for it",
    )
    drain_timeout_s: float = Field(
        300, ge=0, le=86_400, description="time for running requests to finish before they are cut"
    )
    stop_timeout_s: float = Field(
        5, gt=0, le=600, description="time to exit when asked, before SIGKILL"
    )
    liveness_interval_s: float = Field(
        5,
        ge=1,
        le=3600,
        description="an engine with work in which nothing moves for two of these is replaced",
    )
    memory_budget: Annotated[int, Field(ge=1024**2), BeforeValidator(_bytes)] | None = Field(
        None,
        description="main memory that all models together may take, in bytes or as in 12 GiB; "
        "unset: all but a twentieth",
    )
    idle_probe_s: float = Field(
        60, ge=0, le=86_400, description="an idle engine makes one token this often; 0 for never"
    )
    swap_wait_s: float = Field(
        20,
        ge=0,
        le=86_400,
        description="how long requests for a model that is not loaded wait for others to fall idle "
        "before those are given nothing new",
    )
    give_up_below: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of a load below which it is given up when nobody waits for it any more "
        "and another model needs the memory",
    )
    batch_timeout_s: float = Field(
        300, gt=0, le=86_400, description="time an engine may compute on one batch"
    )
    keep_slots: bool = Field(
        default=True,
        description="keep conversations on the disk while their model is away, for this user only",
    )
    slots_budget: Annotated[int, Field(ge=1024**2), BeforeValidator(_bytes)] = Field(
        8 * 1024**3, description="disk that kept conversations may take, in bytes or as in 8 GiB"
    )
    save_timeout_s: float = Field(
        10, gt=0, le=3600, description="time an instance may take to save its conversations"
    )
    restart: RestartTable = RestartTable()


class VariantTable(BaseModel):
    """`[models.NAME.variants.VARIANT]`: request members that count where a client gives none.

    Two names are not members but say more: `set` and `strip`.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    set: dict[str, Any] = Field(
        default_factory=dict, description="request members that count whatever the client gives"
    )
    strip: tuple[str, ...] = Field((), description="request members that are taken out")

    @model_validator(mode="after")
    def _changes_something(self) -> VariantTable:
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


class ModelTable(_Table):
    """`[models.NAME]`: a GGUF file and how to serve it."""

    path: ExpandedPath = Field(description="the GGUF file; of a split model, its first shard")
    profile: str = Field("base", description="a profile of `corral profile list`")
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
        10, ge=0, le=86_400, description="how long it stays at least before it leaves for another"
    )
    flags: dict[str, FlagSetting] = Field(
        default_factory=dict, description="llama-server's own long names; they win over the profile"
    )
    args: tuple[str, ...] = Field(
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


class NodeTable(_Table):
    """`[nodes.NAME]`: another machine whose models are served here too."""

    url: Annotated[str, AfterValidator(_address_of_node)] = Field(
        description="where it listens, as http://192.168.1.7:8080: another llama-corral, a "
        "llama-server, or anything with OpenAI's API"
    )
    key_file: ExpandedPath | None = Field(
        None, description="file with the API key it asks for, readable by this user alone"
    )
    models: tuple[str, ...] = Field(
        (), description="those of its models that are served here; unset: all"
    )
    slots: int = Field(
        4, ge=1, le=1024, description="requests it gets at once, where it does not say itself"
    )
    local_first: bool = Field(
        default=True,
        description="whether it is asked only when nothing here has a slot free; "
        "a conversation that began there stays there",
    )


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


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and where they came from.

    Attributes:
        settings: The merged value.
        path: The file that was read, or None.
        origins: Dotted key → "file", "environment" or "command line"; what is absent is a default.
    """

    settings: Settings
    path: Path | None
    origins: Mapping[str, str]


def load(
    config: Path | None = None,
    *,
    config_dir: Path,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Loaded:
    """Read, merge and check every source.

    Args:
        config: What `--config` named, or None to look for the file.
        config_dir: The user's config directory.
        overrides: Values of the command line, shaped like the file.
        environ: The environment; only `CORRAL_CONFIG` is taken from it here, pydantic-settings
            reads the rest from the process's own.

    Raises:
        SettingsInvalid: The file is missing, is no TOML, or says something that cannot be.
    """
    path = find_file(config, config_dir=config_dir, environ=environ)
    sources = {
        "file": _read(path) if path else {},
        "environment": EnvSettingsSource(Settings)(),
        "command line": dict(overrides or {}),
    }
    merged: dict[str, Any] = functools.reduce(_merged, sources.values(), {})
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise SettingsInvalid(
            _explain(error, path), hint="corral config check reads it again"
        ) from error
    _check_names(settings.models, path)
    origins = {key: name for name, table in sources.items() for key in flatten(table)}
    return Loaded(_relative_to(settings, path), path, origins)


def find_file(config: Path | None, *, config_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the settings file to read, or None when there is none.

    Raises:
        SettingsInvalid: A file was named, and it is not there.
    """
    named = config or (Path(environ["CORRAL_CONFIG"]) if environ.get("CORRAL_CONFIG") else None)
    if named is not None:
        if not named.expanduser().is_file():
            raise SettingsInvalid(
                f"there is no settings file {named}",
                hint="corral config path lists the places that are looked at",
            )
        return named.expanduser().absolute()
    return next((place.absolute() for place in search_path(config_dir) if place.is_file()), None)


def search_path(config_dir: Path) -> tuple[Path, ...]:
    """Return where the file is looked for when none is named, first wins."""
    return (Path(FILE_NAME), config_dir / FILE_NAME)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return two nested tables as one; where both have a leaf, `over` wins."""
    both = {
        key: _merged(under[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(under.get(key), Mapping)
    }
    return {**under, **over, **both}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SettingsInvalid(
            f"{path} is not TOML: {error}", hint="see toml.io for the rules"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"{path} cannot be read: {error}") from error


def _relative_to(settings: Settings, path: Path | None) -> Settings:
    """Return the settings with relative paths counted from the file's directory."""
    base = path.parent if path else Path.cwd()

    def anchored(model: ModelTable) -> ModelTable:
        draft = base / model.draft if isinstance(model.draft, Path) else model.draft
        prompts = tuple(base / prompt for prompt in model.warm_prompts)
        return model.model_copy(
            update={"path": base / model.path, "draft": draft, "warm_prompts": prompts}
        )

    models = {name: anchored(model) for name, model in settings.models.items()}
    engine = settings.engine and base / settings.engine
    keys_file = settings.proxy.keys_file and base / settings.proxy.keys_file
    proxy = settings.proxy.model_copy(update={"keys_file": keys_file})
    nodes = {
        name: node.model_copy(update={"key_file": node.key_file and base / node.key_file})
        for name, node in settings.nodes.items()
    }
    anchors = {"models": models, "nodes": nodes, "engine": engine, "proxy": proxy}
    return settings.model_copy(update=anchors)


def _check_names(models: Mapping[str, ModelTable], path: Path | None) -> None:
    """Refuse a name that clients could mean two models by.

    Raises:
        SettingsInvalid: An alias or a variant has the name of something else.
    """
    owners = {name: name for name in models}
    for name, model in models.items():
        for other in _further_names(name, model):
            if (owner := owners.setdefault(other, name)) != name:
                raise SettingsInvalid(
                    f"{f'{path}: ' if path else ''}models.{name}: the name {other} "
                    f"belongs to the model {owner}",
                    hint="give the alias or the variant a name that no other model has",
                )


def _further_names(name: str, model: ModelTable) -> Iterator[str]:
    yield from model.aliases
    for base in (name, *model.aliases):
        yield from (f"{base}:{variant}" for variant in model.variants)


def _explain(error: ValidationError, path: Path | None) -> str:
    where = f"{path}: " if path else ""
    return "\n".join(f"{where}{_sentence(detail)}" for detail in error.errors())


def _sentence(detail: ErrorDetails) -> str:
    *table, key = [str(part) for part in detail["loc"]]
    name = ".".join([*table, key])
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _known_keys(table), n=1)
        return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")
    if detail["type"] == "missing":
        return f"{name} is missing"
    sentence = f"{name.removesuffix('.[key]')}: {detail['msg']}"
    # An address may hold a password.
    return sentence if key == "url" else f"{sentence} (it is {detail['input']!r})"


def _known_keys(table: list[str]) -> list[str]:
    tables: dict[str, type[BaseModel]] = {
        "": Settings,
        "proxy": ProxyTable,
        "supervisor": SupervisorTable,
        "supervisor.restart": RestartTable,
    }
    in_model = ModelRestartTable if table[2:] == ["restart"] else ModelTable
    if table[:1] == ["nodes"]:
        return list(NodeTable.model_fields)
    return list(tables.get(".".join(table), in_model).model_fields)

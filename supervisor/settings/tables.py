"""Declares the tables of `corral.toml` that depend on no other package's tables."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta
from ipaddress import IPv4Address, IPv4Network
from typing import Annotated, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from proxy.common.toml_types import ExpandedPath, SettingsTable, Text, duration_s, text
from supervisor.models import model_lookup

# `ORGANISATION/MODEL:QUANTISATION` too, as hubs and llama-server's router mode write it.
_MODEL_NAME: Final = re.compile(
    r"(?=.{1,128}\Z)[A-Za-z0-9][A-Za-z0-9._:@+-]*(?:/[A-Za-z0-9_][A-Za-z0-9._:@+-]*){0,7}"
)
_TICKS_PER_INTERVAL: Final = 8
# Reading `/metrics` every second or more keeps the engine from noticing disconnected clients.
_COUNTERS_EVERY_S: Final = 2.0
# An alias that stands for every name that no model has.
CATCH_ALL: Final = "*"
_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+/-]{0,127}|\*")
_SHORT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?(KiB|MiB|GiB|TiB)")
_UNITS: Final = {"KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}


def _pattern_validator(
    pattern: re.Pattern[str], what: str, *, has_slashes: bool = False
) -> AfterValidator:
    slash = " /" if has_slashes else ""

    def check(name: str) -> str:
        if not pattern.fullmatch(name):
            raise ValueError(f"not {what}: letters, digits and . _ : @ + -{slash} only")
        return name

    return AfterValidator(check)


def is_model_name(name: str) -> bool:
    return _MODEL_NAME.fullmatch(name) is not None


def is_alias(name: str) -> bool:
    """Return whether `aliases` may contain this name."""
    return _ALIAS.fullmatch(name) is not None


def _bytes(amount: object) -> object:
    if not isinstance(amount, str) or amount.isdecimal():
        return amount
    if found := _SIZE.fullmatch(amount):
        return int(float(found[1]) * 1024 ** _UNITS[found[2]])
    raise ValueError("not a number of bytes, nor a size such as 12 GiB")


def _seconds(duration: object) -> object:
    if not isinstance(duration, str):
        return duration
    if (seconds := duration_s(duration)) is None:
        raise ValueError('neither seconds nor a duration such as "15m" or "1h30m"')
    return seconds


ModelName = Annotated[str, _pattern_validator(_MODEL_NAME, "a model name", has_slashes=True)]
Alias = Annotated[str, _pattern_validator(_ALIAS, "an alias", has_slashes=True)]
VariantName = Annotated[str, _pattern_validator(_SHORT_NAME, "a variant's name")]
GroupName = Annotated[str, _pattern_validator(_SHORT_NAME, "a group's name")]
NodeName = Annotated[str, _pattern_validator(_SHORT_NAME, "a node's name")]
WorkerName = Annotated[str, _pattern_validator(_SHORT_NAME, "a worker's name")]
# A path, or a reference such as `hf:OWNER/NAME:QUANT`.
ModelPath = Annotated[ExpandedPath, AfterValidator(model_lookup.check)]
Bytes = Annotated[int, BeforeValidator(_bytes, json_schema_input_type=int | str)]
# Seconds, or a duration such as `15m`.
Seconds = Annotated[float, BeforeValidator(_seconds, json_schema_input_type=float | str)]


_SAMPLE_MAX_S: Final = 5.0
# At least this many samples in queued_s and in quiet_s.
_SAMPLES: Final = 10
# A multiple of queued_s; it bounds the number of stored samples.
_QUIET_MAX: Final = 500


class SlotSettings(SettingsTable):
    """`[models.NAME.slots]`: slots that follow demand if `parallel` and `ctx-size` are auto."""

    follow_demand: bool = True
    """add slots, each with as much context, while requests queue and memory allows; remove slots
    when demand is low"""
    max: int = Field(16, ge=1, le=256)
    """the most slots of one instance"""
    queued_s: float = Field(60, gt=0, le=3600)
    """how long requests queue before slots are added"""
    quiet_s: float = Field(600, gt=0, le=86_400)
    """how long at most half of the slots are in use before slots are removed"""

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        if self.quiet_s > _QUIET_MAX * self.queued_s:
            raise ValueError(f"quiet_s is more than {_QUIET_MAX} times queued_s")
        return self

    @property
    def sample_s(self) -> float:
        return min(_SAMPLE_MAX_S, self.queued_s / _SAMPLES, self.quiet_s / _SAMPLES)


class LoadBalanceConfig(SettingsTable):
    """Conditions for a decision to move layers."""

    min_samples: int = Field(100, ge=1, le=10**9)
    """passes of each worker before anything is decided"""
    imbalance_threshold: float = Field(2.0, ge=1, le=1000)
    """how many times longer the slowest worker takes per layer than the fastest one before layers
    are moved"""
    eval_interval_secs: int = Field(60, ge=0, le=86_400)
    """shortest time between two automatic decisions, in seconds"""


class BalanceSettings(LoadBalanceConfig):
    """`[balance]`: layers of models that are split over workers."""

    automatic: bool = False
    """move layers as `corral balance --apply` does; each move loads the model again"""


_TIME: Final = r"(?:[01]\d|2[0-3]):[0-5]\d"
_HOURS: Final = re.compile(rf"({_TIME})-(?!\1)({_TIME})")


def _check_hours(hours: str) -> str:
    if not _HOURS.fullmatch(hours):
        raise ValueError('not two different times of day, as in "22:00-07:00"')
    return hours


class DeviceSettings(SettingsTable):
    """`[devices]`: when models leave devices to other programs."""

    model_config = ConfigDict(serialize_by_alias=True)

    yields: Literal["never", "idle", "always"] = Field(
        "never",
        alias="yield",  # a keyword of Python
        description="which models give way when other programs fill a device, the least valuable "
        "first: none, idle ones, or busy ones too once they have answered",
    )
    reserve: Annotated[Bytes, Field(ge=1024**2, le=2**50)] = 512 * 1024**2
    """models give way when other programs leave less free memory of a device than this, in bytes or
    as in 512 MiB"""
    check_interval_s: float = Field(5, ge=0.1, le=3600)
    """how often to look at the memory of devices that models use or gave up"""
    return_after_s: float = Field(30, ge=0, le=86_400)
    """how long there must be room for a model that gave way before it is loaded again without a
    request"""
    quiet_hours: Annotated[str, AfterValidator(_check_hours)] | None = None
    """local times of each day, as in 22:00-07:00, in which no model uses a device, as after `corral
    yield`"""

    def quiet_until(self, now: datetime) -> datetime | None:
        """Return the end of the quiet hours; None outside of them. `now` is local time."""
        if self.quiet_hours is None:
            return None
        first, last = map(time.fromisoformat, self.quiet_hours.split("-"))
        for day in (now.date() - timedelta(days=1), now.date()):
            begin = datetime.combine(day, first, now.tzinfo)
            end = datetime.combine(day + timedelta(days=last < first), last, now.tzinfo)
            if begin <= now < end:
                return end
        return None


class HistorySettings(SettingsTable):
    """`[history]`: figures of finished requests, never their texts."""

    enabled: bool = True
    """keep figures of each request on disk, for this user alone; `corral requests --last 20` shows
    them"""
    max_bytes: Annotated[Bytes, Field(ge=1024**2, le=2**40)] = 64 * 1024**2
    """disk space for these figures, in bytes or as in 64 MiB; the oldest are deleted first"""
    max_age_days: float = Field(90, gt=0, le=36_500)
    """older figures are deleted"""

    @property
    def limits(self) -> tuple[int, float] | None:
        """The bytes and days to keep; None while it is off."""
        return (self.max_bytes, self.max_age_days) if self.enabled else None


HookName = Literal[
    "model_loaded",
    "model_unloaded",
    "model_failed",
    "model_idle",
    "daemon_idle",
    "node_down",
    "node_up",
]

# Time that commands get when the daemon stops, after its engines have stopped.
STOP_LIMIT_S: Final = 5.0
_COMMANDS_MAX: Final = 8
_WORDS_MAX: Final = 64
_WORD_MAX: Final = 4096
_SECONDS_MAX: Final = 31_536_000


def _commands(value: object) -> object:
    """Turn a single command, a list of words, into a list with this command."""
    if isinstance(value, str):
        raise ValueError(  # noqa: TRY004 (pydantic explains a ValueError)
            'not a list of words, as ["notify-send", "loaded"]; no shell reads it'
        )
    is_one = isinstance(value, list | tuple) and value and isinstance(value[0], str)
    return [value] if is_one else value


def _command(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words or not words[0]:
        raise ValueError("no program: the first word names it")
    return words


Words = Annotated[
    tuple[Annotated[Text, Field(max_length=_WORD_MAX)], ...],
    Field(max_length=_WORDS_MAX),
    BeforeValidator(lambda words: _command(tuple(words)) if isinstance(words, list) else words),
]
Commands = Annotated[
    tuple[Words, ...],
    Field(max_length=_COMMANDS_MAX),
    BeforeValidator(_commands, json_schema_input_type=list[str] | list[list[str]]),
]


class HookSettings(SettingsTable):
    """`[hooks]`: each hook is a command as a list of words, or a list of commands."""

    model_loaded: Commands = ()
    """a model began to serve"""
    model_unloaded: Commands = ()
    """the last process of a model has stopped"""
    model_failed: Commands = ()
    """a process of a model crashed or did not start"""
    model_idle: Commands = ()
    """a loaded model had no request for model_idle_s"""
    daemon_idle: Commands = ()
    """no model had a request for daemon_idle_s"""
    node_down: Commands = ()
    """another machine does not answer, or stops"""
    node_up: Commands = ()
    """another machine answers again"""
    timeout_s: float = Field(30, gt=0, le=3600)
    """time for one command, after which it is killed"""
    model_idle_s: float = Field(600, ge=1, le=_SECONDS_MAX)
    """time without a request for model_idle"""
    daemon_idle_s: float = Field(600, ge=1, le=_SECONDS_MAX)
    """time without a request for daemon_idle"""

    def commands(self, hook: HookName) -> tuple[tuple[str, ...], ...]:
        found: tuple[tuple[str, ...], ...] = getattr(self, hook)
        return found


GITHUB: Final = "https://api.github.com/repos/ggml-org/llama.cpp/releases"


def _url(value: str) -> str:
    parts = urlsplit(text(value))
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("not an address such as https://example.com/releases")
    return value.rstrip("/")


Url = Annotated[str, AfterValidator(_url)]


class ReleaseSettings(SettingsTable):
    """`[releases]`: a mirror of llama.cpp's releases."""

    api: Url = GITHUB
    """GitHub's list of releases, or a mirror of it"""
    downloads: Url | None = None
    """URL of a mirror that has the files as URL/TAG/NAME; unset: the addresses in the list. The
    files must have the SHA-256 given in the list"""


Exposure = Literal["loopback", "private", "public", "every"]

# Private (RFC 1918), shared by a provider or an overlay network (RFC 6598), and link-local
# (RFC 3927).
_PRIVATE: Final = tuple(
    map(
        IPv4Network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"),
    )
)


def exposure(host: str) -> Exposure | None:
    """Return who can reach an IPv4 address; `every` for 0.0.0.0, None for a host name."""
    if host == "localhost":
        return "loopback"
    try:
        address = IPv4Address(host)
    except ValueError:
        return None
    if address.is_unspecified:
        return "every"
    if address.is_loopback:
        return "loopback"
    return "private" if any(address in network for network in _PRIVATE) else "public"


# Engines reach workers by IPv4 only. Source: llama.cpp, ggml-rpc, transport.cpp (AF_INET).
_ADDRESS: Final = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?):([1-9]\d{0,4})")
_PORT_MAX: Final = 65_535
_LOCAL_ONLY: Final = ("port", "threads", "device", "cache")


def _worker_address(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if not found or int(found[2]) > _PORT_MAX:
        raise ValueError("not HOST:PORT, as 192.168.1.7:50052")
    if exposure(found[1]) == "public":
        raise ValueError("a public address; the protocol has no encryption: use a tunnel")
    if exposure(found[1]) == "every":
        raise ValueError("not the address of one machine")
    return text


class WorkerSettings(SettingsTable):
    """`[workers.NAME]`: a `ggml-rpc-server`, here or on another machine."""

    address: Annotated[str, AfterValidator(_worker_address)] | None = None
    """HOST:PORT of a running worker, such as a `corral worker`"""
    local: bool = False
    """the daemon runs this worker on this machine, for itself alone"""
    port: int = Field(0, ge=0, le=_PORT_MAX)
    """port of a local worker; 0: any free port"""
    threads: int | None = Field(None, ge=1, le=1024)
    """threads of a local worker; unset: half of all CPUs"""
    device: Text | None = None
    """devices that a local worker offers, separated by commas; unset: all, or the CPU"""
    cache: bool = False
    """a local worker keeps large tensors on disk, for faster loads"""
    memory: Annotated[Bytes, Field(ge=1024**2, le=2**60)] | None = None
    """memory that a model may take there; unset: the memory that the worker reports"""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if self.local == (self.address is not None):
            raise ValueError("needs either address = HOST:PORT or local = true")
        wrong = [key for key in _LOCAL_ONLY if key in self.model_fields_set]
        if wrong and not self.local:
            raise ValueError(f"{wrong[0]} is for local = true; set it where the worker runs")
        return self


class RestartPolicy(SettingsTable):
    """`[supervisor.restart]`: when an instance is restarted after a failure."""

    backoff_initial_s: float = Field(0.5, gt=0, le=3600)
    """longest delay after the first failure; doubles with each further failure"""
    backoff_max_s: float = Field(60, gt=0, le=86_400)
    """longest delay ever"""
    max_failures: int = Field(5, ge=1, le=1000)
    """failures close together after which the process is no longer restarted"""
    failure_half_life_s: float = Field(300, gt=0, le=604_800)
    """time in which the count of failures halves"""


class HealthSettings(SettingsTable):
    """How closely a serving engine is watched."""

    liveness_interval_s: float = Field(5, ge=1, le=3600)
    """an engine that makes no progress for two of these is replaced"""
    idle_probe_s: float = Field(60, ge=0, le=86_400)
    """how often an idle engine has to generate one token; 0 for never"""
    batch_timeout_s: float = Field(300, gt=0, le=86_400)
    """time for an engine to compute one batch, without its waits for a processor"""

    @property
    def tick_s(self) -> float:
        return self.liveness_interval_s / _TICKS_PER_INTERVAL

    @property
    def silence_s(self) -> float:
        """The silence that makes an engine unhealthy."""
        # One tick may pass before progress is noticed, and another before its end is. So a hang is
        # found within two intervals.
        return 2 * self.liveness_interval_s - 2 * self.tick_s

    @property
    def counters_every_s(self) -> float:
        return min(_COUNTERS_EVERY_S, self.liveness_interval_s / 2)


class InstanceLimits(HealthSettings):
    """How long each state of an instance may last, in seconds."""

    load_timeout_s: float = Field(300, gt=0, le=86_400)
    """longest silence while loading"""
    warm_timeout_s: float = Field(30, gt=0, le=3600)
    """time for the warm-up request"""
    unhealthy_timeout_s: float = Field(60, gt=0, le=3600)
    """time for an engine to recover before it is restarted; less while requests wait for it"""
    drain_timeout_s: float = Field(300, ge=0, le=86_400)
    """time for running requests to finish before they are aborted"""
    stop_timeout_s: float = Field(5, gt=0, le=600)
    """time to exit before SIGKILL"""
    # Time after SIGKILL before it is sent again.
    kill_timeout_s: ClassVar[float] = 5.0

"""Defines a setting with its origin and reason, and tables of llama-server's option names.

Profiles and `corral.toml` use today's long names. The tables translate a setting for a build that
has an older name, and a user's old name to today's. RESERVED lists options that users may not set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import AfterValidator

from proxy.common.toml_types import number
from supervisor.builds.help import FlagValue

CORRAL: Final = "llama-corral"
BATCHING: Final = "batching"
# Control characters except tab, line feed and carriage return, which a template may contain.
_CONTROL_IN_LINES: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def argument(text: str) -> str:
    """Check a word of a command line; raises ValueError for control characters."""
    if _CONTROL_IN_LINES.search(text):
        raise ValueError("it has a control character")
    return text


def flag_name(name: str) -> str:
    """Check the name of a flag; raises ValueError if no build could have it."""
    if not re.fullmatch(r"-{0,2}[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ValueError("not an option of llama-server")
    return name


def flag_value(value: FlagValue) -> FlagValue:
    """Check a value; raises ValueError if infinite, over 64 bits or with control characters."""
    return argument(value) if isinstance(value, str) else number(value)


Argument = Annotated[str, AfterValidator(argument)]
FlagName = Annotated[str, AfterValidator(flag_name)]
FlagSetting = Annotated[FlagValue, AfterValidator(flag_value)]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its origin."""

    value: FlagValue
    # `model NAME`, `batching`, `profile NAME`, `machine`, `demand`, `gguf` or `llama-corral`
    origin: str
    reason: str = ""  # a clause; empty if the origin says it all
    is_derived: bool = False  # whether it was `auto`
    is_adapted: bool = False  # whether the daemon changed it while it serves

    @property
    def is_from_user(self) -> bool:
        """Whether its value follows from the model's own table alone."""
        return self.origin == BATCHING or self.origin.startswith("model ")

    @property
    def is_own(self) -> bool:
        """Whether the model's own table gives its value."""
        is_given = self.origin == BATCHING and not self.is_derived
        return is_given or self.origin.startswith("model ")


SettingsByFlag = Mapping[str, Setting]


def values(settings: SettingsByFlag) -> dict[str, FlagValue]:
    return {key: setting.value for key, setting in settings.items()}


# Source: history of common/arg.cpp, b3716 to b11434; the build in a comment is the first with the
# newer form.

OptionValue = tuple[str, FlagValue]

# Today's name: the names it had before, newest first. All take the same values.
SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpu-layers": ("n-gpu-layers", "ngl"),
    "ui": ("webui",),  # b9174
    "cache-idle-slots": ("clear-idle",),  # b8852
    "ctx-checkpoints": ("swa-checkpoints",),  # b6685
    "checkpoint-min-step": ("checkpoint-every-n-tokens",),  # b9310
    "embedding": ("embeddings",),
    "rerank": ("reranking",),
    "predict": ("n-predict",),
    # b8955 put everything about drafting under --spec-draft-*. It left some old names as
    # aliases and others as stubs that refuse to start.
    "spec-draft-model": ("model-draft", "md"),
    "spec-draft-n-max": ("draft-max", "draft-n", "draft"),
    "spec-draft-n-min": ("draft-min", "draft-n-min"),
    "spec-draft-p-min": ("draft-p-min",),
    "spec-draft-p-split": ("spec--draft-p-split", "draft-p-split"),
    "spec-draft-ngl": ("gpu-layers-draft", "n-gpu-layers-draft", "ngld"),
    "spec-draft-type-k": ("cache-type-k-draft", "ctkd"),
    "spec-draft-type-v": ("cache-type-v-draft", "ctvd"),
    "spec-draft-threads": ("threads-draft", "td"),
    "spec-draft-threads-batch": ("threads-batch-draft", "tbd"),
    "spec-draft-device": ("device-draft", "devd"),
    "spec-draft-hf": ("hf-repo-draft", "hfd", "hfrd"),
    "spec-draft-ctx-size": ("ctx-size-draft", "cd"),
    "spec-draft-replace": ("spec-replace",),
    "spec-draft-prio": ("prio-draft",),
    "spec-draft-poll": ("poll-draft",),
    "spec-draft-cpu-moe": ("cpu-moe-draft", "cmoed"),
    "spec-draft-n-cpu-moe": ("spec-draft-ncmoe", "n-cpu-moe-draft", "ncmoed"),
    "spec-draft-override-tensor": ("override-tensor-draft", "otd"),
}

# A setting that became another option with another value: old, then today's. `--mlock` meant the
# mapped file until b10104, and so lets replicas share its pages; b10105 reads it as mode `mlock`,
# which does not map.
MOVED: Final[Mapping[OptionValue, OptionValue]] = {
    ("mlock", True): ("load-mode", "mmap+mlock"),
    ("mmap", False): ("load-mode", "none"),
    ("mmap", True): ("load-mode", "mmap"),
    ("direct-io", True): ("load-mode", "dio"),
}

# The reverse, for builds without the new option (b10105).
MOVED_BACK: Final[Mapping[OptionValue, OptionValue]] = {
    ("load-mode", "mmap+mlock"): ("mlock", True),
    ("load-mode", "mlock"): ("mlock", True),
    ("load-mode", "none"): ("mmap", False),
    ("load-mode", "dio"): ("direct-io", True),
}

# Words for which an older build has another word or only a number.
OLDER_WORDS: Final[Mapping[OptionValue, FlagValue]] = {
    ("gpu-layers", "all"): 999,  # b7553
    ("gpu-layers", "auto"): 999,
    ("spec-draft-ngl", "all"): 999,
    ("spec-draft-ngl", "auto"): 999,
    ("spec-type", "draft-simple"): "draft",  # b9131
    ("spec-type", "draft-eagle3"): "eagle3",
}

# Options that were bare switches before they took on, off or auto. A bare `--flash-attn` given to a
# newer build consumes the next word of the command line.
ONCE_BARE: Final = frozenset({"flash-attn", "log-colors"})  # b6325, b6393

# Values that a build without the option uses anyway.
IMPLIED: Final[Mapping[OptionValue, str]] = {
    ("spec-type", "draft-simple"): "a draft model alone turns drafting on in this build",
    ("load-mode", "mmap"): "mapping the file is what this build does",
    ("load-mode", "auto"): "mapping the file is what this build does",
}

_ADDRESS: Final = "llama-corral chooses the addresses of its engines"
_KEYS: Final = "llama-corral gives each engine a random key of its own"
_MODEL: Final = "path names the model"
_FETCH: Final = "engines work offline; download the file and set path"
_ROUTER: Final = "an engine serves one model; llama-corral is the router"
_TOOLS: Final = "an engine runs tools and opens other servers only with engine_tools = true"
# What `engine_tools` of a model allows in its own flags.
ENGINE_TOOLS: Final = frozenset(
    (
        *("tools", "tools-runtime", "agent"),
        *("mcp-servers-config", "mcp-servers-json", "ui-mcp-proxy"),
    )
)
_LOG: Final = "llama-corral manages the log"
_EXITS: Final = "the engine would print something and exit"

# Options that llama-corral sets itself, or forbids.
RESERVED: Final[Mapping[str, str]] = (
    dict.fromkeys(("host", "port", "reuse-port", "api-prefix", "path"), _ADDRESS)
    | dict.fromkeys(("api-key", "api-key-file"), _KEYS)
    | dict.fromkeys(("slot-save-path",), "llama-corral saves conversations itself (persist_slots)")
    | dict.fromkeys(("ssl-key-file", "ssl-cert-file"), "engines are reached on this machine only")
    | dict.fromkeys(("model",), _MODEL)
    | dict.fromkeys(("alias",), "engines use the model's name; set others as aliases")
    | dict.fromkeys(
        ("model-url", "docker-repo", "hf-repo", "hf-file", "hf-token", "spec-draft-hf"), _FETCH
    )
    | dict.fromkeys(("models-dir", "models-preset", "models-max", "models-autoload"), _ROUTER)
    | dict.fromkeys(sorted(ENGINE_TOOLS), _TOOLS)
    | dict.fromkeys(("log-file", "log-disable", "log-jsonl"), _LOG)
    | dict.fromkeys(
        ("help", "usage", "version", "list-devices", "cache-list", "completion-bash"), _EXITS
    )
)

# Presets such as --gpt-oss-20b-default, which replace our model by one from the network.
_PRESETS: Final = ("embd-", "fim-", "gpt-oss-", "vision-", "tts-oute")


def reserved_reason(key: str, *, runs_tools: bool = False) -> str | None:
    """Return why users may not set an option, or None; `runs_tools`: as the model's setting."""
    if runs_tools and key in ENGINE_TOOLS:
        return None
    if key.startswith(_PRESETS) and key.endswith(("-default", "-spec")):
        return _MODEL
    return RESERVED.get(key)

"""Options of llama-server by name, as they become the flags and other keys of a model.

An option is looked up in the help of the engine at hand, then in the recorded builds, the newest
first: a command line may have been written for any of them.

Source: llama.cpp, common/arg.cpp: an option given twice counts as it was given last, but for those
that collect values; a variable LLAMA_ARG_X counts where its option is not given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from supervisor.engines.help import Flag, Flags, FlagValue, newest_flags, plain, recorded_flag
from supervisor.errors import NoSuchModel, SettingsInvalid
from supervisor.flags.renames import ONCE_BARE
from supervisor.flags.render import canonical, render
from supervisor.host.files import expanded
from supervisor.hub import reference
from supervisor.model_stores.references import HUB, is_reference

Option = tuple[str, str | None]

_COLLECTED: Final = frozenset(
    {"lora", "lora-scaled", "override-kv", "override-tensor", "spec-draft-override-tensor"}
    | {"control-vector", "control-vector-scaled"}
)
# They collect values too, but have no separator: all but the first go to `args`.
_REPEATED: Final = frozenset({"dry-sequence-breaker", "logit-bias"})
_TRUE: Final = frozenset({"1", "true", "on", "enabled"})
_FALSE: Final = frozenset({"0", "false", "off", "disabled"})
_SWITCH_WORDS: Final = _TRUE | _FALSE | {"auto"}
# TOML has integers of 64 bits.
_NUMBER: Final = re.compile(
    r"[+-]?(?:\d{1,18}|\d{0,15}\.\d{1,15})(?:e[+-]?\d{1,2})?", re.IGNORECASE
)
# Where the model is, where the engine listens, and for whom.
_WORDS: Final = frozenset(
    {"model", "host", "port", "hf-file", "ssl-key-file", "ssl-cert-file", "api-key-file"}
    | {"models-dir"}
)
_SECRET: Final = re.compile(r"key|token|secret|password", re.IGNORECASE)
_DOWNLOADS: Final = {
    "mmproj-url": "corral model get downloads a model with its projector",
    "docker-repo": "models of Docker's registry are not fetched; set path to a GGUF file",
    "hf-token": "corral model get reads the token from HF_TOKEN",
}
# Source: llama.cpp, common/arg.cpp: what each of these options sets.
_FIM: Final = "--port 8012 -ub 1024 -b 1024 -c 0 --cache-reuse 256"
_GPT_OSS: Final = (
    "--port 8013 -ub 2048 -b 32768 -np 2 -c 262144 --temp 1 --top-p 1 --top-k 0 --min-p 0.01"
)
_CODER: Final = "ggml-org/Qwen2.5-Coder"
_PRESETS: Final = {
    "fim-qwen-1.5b-default": f"-hf {_CODER}-1.5B-Q8_0-GGUF {_FIM}",
    "fim-qwen-3b-default": f"-hf {_CODER}-3B-Q8_0-GGUF {_FIM}",
    "fim-qwen-7b-default": f"-hf {_CODER}-7B-Q8_0-GGUF {_FIM}",
    "fim-qwen-7b-spec": f"-hf {_CODER}-7B-Q8_0-GGUF -hfd {_CODER}-0.5B-Q8_0-GGUF {_FIM}",
    "fim-qwen-14b-spec": f"-hf {_CODER}-14B-Q8_0-GGUF -hfd {_CODER}-0.5B-Q8_0-GGUF {_FIM}",
    "fim-qwen-30b-default": f"-hf ggml-org/Qwen3-Coder-30B-A3B-Instruct-Q8_0-GGUF {_FIM}",
    "gpt-oss-20b-default": f"-hf ggml-org/gpt-oss-20b-GGUF {_GPT_OSS} --jinja",
    "gpt-oss-120b-default": f"-hf ggml-org/gpt-oss-120b-GGUF {_GPT_OSS} --jinja",
    "vision-gemma-4b-default": "-hf ggml-org/gemma-3-4b-it-qat-GGUF --port 8014 -c 0 --jinja",
    "vision-gemma-12b-default": "-hf ggml-org/gemma-3-12b-it-qat-GGUF --port 8014 -c 0 --jinja",
    "embd-gemma-default": "-hf ggml-org/embeddinggemma-300M-qat-q4_0-GGUF --port 8011 -ub 2048 "
    "-b 2048 -np 32 -c 65536 --embedding",
}


@dataclass
class ModelOptions:
    """What the options of one engine say.

    Attributes:
        known: The options of the engine at hand.
        words: Where the model is, and where the engine listens, by the option's long name.
        keys: The API keys that clients must have.
        omitted: What is not taken over, with the reason.
        notes: What is to be known of what is taken over.
    """

    known: Flags = field(default_factory=newest_flags)
    words: dict[str, str] = field(default_factory=dict)
    aliases: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list, repr=False)
    flags: dict[str, FlagValue] = field(default_factory=dict)
    args: list[str] = field(default_factory=list)
    omitted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def source(self) -> str | None:
        """The model: a path, or a reference such as `hf:OWNER/NAME:QUANT`."""
        path, repository, file = map(self.words.get, ("model", "hf-repo", "hf-file"))
        if path or not repository:
            return path or None
        return f"{HUB}{repository.partition(':')[0]}:{file}" if file else f"{HUB}{repository}"

    def read(self, words: Sequence[str]) -> None:
        """Take over the words of a command line after the program's name."""
        for name, value in self._options(words):
            if name.startswith("-"):
                self.take(name, value)
            else:
                self.omitted.append(f"{name}: not an option")

    def take(self, name: str, value: str | None) -> None:
        """Take over one option of any build, with or without its dashes."""
        match key := self._key(name):
            case _ if key in _WORDS:
                self.words[key] = value or ""
            case "hf-repo":
                self._take_repository(name, value or "")
            case "alias":
                self.aliases += split_list(value or "")
            case "api-key":
                self.keys += split_list(value or "")
            case _ if key in _PRESETS:
                self.read(_PRESETS[key].split())
            case _:
                self._take_flag(name, key, value)

    def take_variable(self, name: str, value: str) -> bool:
        """Take over a variable such as LLAMA_ARG_CTX_SIZE; return whether an option has it."""
        positive = name.replace("LLAMA_ARG_NO_", "LLAMA_ARG_", 1)
        for wanted in (name, positive):
            option = next((one for one in self._variables() if one.env == wanted), None)
            if option and (wanted == name or option.hint is None):
                self.take(option.key if wanted == name else f"no-{option.key}", value)
                return True
        return False

    def _variables(self) -> Iterator[Flag]:
        yield from self.known.entries
        yield from newest_flags().entries

    def _take_repository(self, name: str, value: str) -> None:
        try:
            found = reference.parse(value)
        except NoSuchModel as error:
            self.omitted.append(f"{name} {value}: {error.message}")
            return
        if isinstance(found, reference.HubReference):
            self.words["hf-repo"] = str(found)

    def _take_url(self, url: str) -> None:
        """Take over the URL of a model: a file of Hugging Face is one by reference."""
        with suppress(NoSuchModel):
            found = reference.parse(url)
            if isinstance(found, reference.HubReference):
                self.words["hf-repo"] = str(found)
                return
        shown = reference.without_secrets(url)
        self.omitted.append(f"model-url: corral model get {shown} downloads it; then set path")

    def _take_flag(self, name: str, key: str, value: str | None) -> None:
        shown = name if value is None or _SECRET.search(name) else f"{name} {value}"
        if key == "model-url":
            self._take_url(value or "")
            return
        if key == "spec-draft-hf":
            self.omitted.append(f"{name}: corral model get {value} downloads it; then set draft")
            return
        if reason := _DOWNLOADS.get(key):
            self.omitted.append(f"{shown}: {reason}")
            return
        if not self._find(name):
            self.omitted.append(f"{shown}: no known build of llama-server has it")
            return
        try:
            key, typed = canonical(name, self._typed(name, value), self.known)
            render({key: typed}, self.known)
        except SettingsInvalid as error:
            reason = error.message.partition(": ")[2] or error.message
            self.omitted.append(f"{shown}: {reason}")
            return
        self._set(key, typed)

    def settled_flags(self) -> dict[str, FlagValue]:
        """Return the flags after all options are read, and note those that the engine lacks."""
        found = {self._of_ngrams(key): value for key, value in self.flags.items()}
        for unused in render(found, self.known).omitted:
            self.notes.append(f"{unused.key} = {unused.value}: {unused.reason}")
        return found

    def _of_ngrams(self, key: str) -> str:
        """Return the option of one kind of n-gram drafting that an older one for all kinds means.

        Source: llama.cpp, common/arg.cpp: what the help says of removed options.
        """
        kind, mod = self.flags.get("spec-type"), "ngram-mod"
        limit = key.removeprefix("spec-draft-") if kind == mod else ""
        if limit in {"n-max", "n-min"} and "spec-draft-model" not in self.flags:
            newer = f"spec-{mod}-{limit}"
        elif kind == mod and key == "spec-ngram-size-n":
            newer = f"spec-{mod}-n-match"
        else:
            newer = key.replace("spec-ngram-", f"spec-{kind}-", 1)
        return newer if self.known.find(newer) else key

    def _set(self, key: str, value: FlagValue) -> None:
        present = self.flags.get(key)
        if key == "load-mode" and {present, value} == {"mmap+mlock", "none"}:
            value = "mlock"  # --mlock and --no-mmap together
        elif present is not None and key in _COLLECTED:
            value = f"{present},{value}"
        elif present is not None and key in _REPEATED:
            self.args += [f"--{key}", str(value)]
            return
        self.flags[key] = value

    def _options(self, words: Sequence[str]) -> Iterator[Option]:
        at = 0
        while at < len(words):
            name, equals, value = words[at].partition("=")
            at += 1
            if equals and name.startswith("-") and self._find(name):
                yield name, value
                continue
            word, count = words[at - 1], self._value_count(words[at - 1], words[at:])
            values, at = words[at : at + count], min(at + count, len(words))
            if count > 1 and not word.endswith("-scaled"):
                self.args += [word, *values]
            else:
                yield word, ":".join(values) if values else None

    def _value_count(self, word: str, rest: Sequence[str]) -> int:
        """Return how many of the next words are values of an option."""
        flag = self._find(word) if word.startswith("-") else None
        if flag is None or flag.kind == "unknown":
            return int(word.startswith("-") and bool(rest) and not _is_option(rest[0]))
        if flag.key in ONCE_BARE:
            is_value = bool(rest) and (rest[0].lower() in _SWITCH_WORDS or rest[0][:1] == "$")
            return int(is_value)
        if flag.key.endswith("-scaled") and len(rest) > 1 and ":" not in rest[0]:
            return 1 + bool(_NUMBER.fullmatch(rest[1]))  # FILE SCALE, as older builds have it
        return flag.value_count

    def _find(self, name: str) -> Flag | None:
        return self.known.find(name) or recorded_flag(name)

    def _key(self, name: str) -> str:
        flag = self._find(name)
        return flag.key if flag else plain(name)

    def _typed(self, name: str, value: str | None) -> FlagValue:
        """Return a value as settings have it: a number, a word, or true for a bare option."""
        flag = self._find(name)
        if value is None:
            return "on" if flag and flag.key in ONCE_BARE else True
        word, is_switch = value.lower(), flag is not None and flag.hint is None
        if word in _TRUE | _FALSE and (is_switch or (flag and {"on", "off"} <= {*flag.choices})):
            return word in _TRUE if is_switch else ("on" if word in _TRUE else "off")
        if _NUMBER.fullmatch(value) and not (flag and flag.kind in {"path", "string", "list"}):
            return int(value) if value.lstrip("+-").isdecimal() else float(value)
        return value


def _is_option(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.fullmatch(word)


def split_list(text: str) -> list[str]:
    """Split a list with commas."""
    return [part for word in text.split(",") if (part := word.strip())]


def resolved(path: str, base: Path) -> str:
    """Return a path of a source, relative to the directory that it is read from."""
    return path if is_reference(path) else str(base / expanded(Path(path)))


def unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))

"""Parses the options of a build from its `--help`, and knows the values of `--spec-type`.

Source: llama.cpp, common/arg.cpp (common_arg::to_string), whose format has held since b3716;
common_speculative_n_max; --spec-type and its defaults in the --help of builds 10434 and 11434.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from supervisor.system.paths import shipped_directory

# The option that limits the tokens drafted at once, and its default; ngram-cache has no option.
_NGRAM_LIMITS: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "ngram-mod": ("spec-ngram-mod-n-max", 64),
        "ngram-simple": ("spec-ngram-simple-size-m", 48),
        "ngram-map-k": ("spec-ngram-map-k-size-m", 48),
        "ngram-map-k4v": ("spec-ngram-map-k4v-size-m", 48),
        "ngram-cache": ("", 8),
    }
)
# Drafting with layers of the model itself (multi-token prediction).
MTP: Final = "draft-mtp"
# The limit of every type that drafts with a model or with heads: draft-simple, -eagle3, -mtp,
# -dflash and -dspark.
_MODEL_LIMIT: Final = ("spec-draft-n-max", 3)
# Before b9464 a draft model alone turned on drafting of up to 16 tokens.
_UNNAMED: Final = "draft"
_UNNAMED_LIMIT: Final = ("spec-draft-n-max", 16)


def spec_types(chosen: Mapping[str, FlagValue]) -> list[str]:
    """Return the values of `--spec-type` in use, for options by today's names; often empty."""
    default = _UNNAMED if "spec-draft-model" in chosen else "none"
    kinds = str(chosen.get("spec-type", default)).split(",")
    return [kind for kind in kinds if kind not in {"", "none"}]


def draft_limits(chosen: Mapping[str, FlagValue]) -> Iterator[tuple[str, int]]:
    """Yield, for each type in use, the option that limits drafted tokens, and its default."""
    for kind in spec_types(chosen):
        yield _UNNAMED_LIMIT if kind == _UNNAMED else _NGRAM_LIMITS.get(kind, _MODEL_LIMIT)


def has_draft_cache(chosen: Mapping[str, FlagValue]) -> bool:
    """Return whether another model drafts, whose KV cache is beside that of the model.

    N-grams need only the text, and layers of the model itself draft with its own cache.
    """
    kinds = {*spec_types(chosen)} - _NGRAM_LIMITS.keys() - {MTP}
    return "spec-draft-model" in chosen or bool(kinds)


FlagValue = str | int | float | bool


Kind = Literal["switch", "int", "number", "enum", "list", "path", "string", "unknown"]

_NAMES: Final = re.compile(r"-[^\s,]+(?:,\s+-[^\s,]+)*")
_PRINTED: Final = re.compile(r"(?: (\S.*?))?(?:\s{2,}(\S.*))?")
_DERIVED: Final = re.compile(r"(?:\s+(?!\(env: )(\S.*?))?(?:\s+(\(env: .*))?")
_ENV: Final = re.compile(r"\(env: (\w+)\)")
_DEFAULT: Final = re.compile(r"default: ['\"]?(.*?)(?=[,)'\"]| \(|; |$)")
_ALLOWED: Final = re.compile(r"allowed values: (\w+(?:, \w+)*)")
_BULLET: Final = re.compile(r"- ([a-z][\w+-]*)(?: \(default\))?:")
_WORDS: Final = re.compile(r"exact number, ((?:(?:or )?'\w+'(?:, )?)+)")
_REMOVED: Final = re.compile(r"the argument has been removed\. (.*?)(?: \(env: |$)")
_CHOICE_HINT: Final = re.compile(r"[\[{<](\w[\w+-]*(?:[|,][\w+-]+)+)[]}>]")
_LIST_HINT: Final = re.compile(r"[a-z][\w-]*(?:,[a-z][\w-]*)+")

_INT_HINTS: Final = frozenset({"SEED", "PORT", "INDEX", "SECONDS", "<0...100>"})
_NUMBER_HINTS: Final = frozenset({"N", "P", "L", "SIMILARITY"})
_PATH_HINTS: Final = frozenset({"FNAME", "PATH", "FILE", "DIR", "JINJA_TEMPLATE_FILE"})
_BULLET_HINTS: Final = frozenset({"MODE", "TYPE", "FORMAT"})


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]  # all spellings with dashes, in the printed order, also negative forms
    kind: Kind  # the kind of its value; a `switch` has none
    hint: str | None = None  # the name of its value in the help, such as `N`; None without a value
    # The words that it accepts; empty if it accepts any. An `int` or `number` accepts these words
    # as well as numbers; a `list` accepts any of them, separated by commas.
    choices: tuple[str, ...] = ()
    default: str | None = None  # None if not printed
    env: str | None = None
    deprecated: str | None = None  # the help's note on deprecation, or None
    removed: str | None = None  # the help's advice if the option only refuses to start, or None
    help: str = ""  # the printed description, without the indent

    @property
    def key(self) -> str:
        """The name in settings: the first long spelling, without its dashes."""
        longs = [name for name in self.names if name.startswith("--")]
        positive = [name for name in longs if not name.startswith("--no-")]
        return (positive or longs or self.names)[0].lstrip("-")

    @property
    def value_count(self) -> int:
        """Number of words after it: two for `START END`, one for `<a pattern>=<a type>,...`."""
        hint = self.hint or ""
        words = hint.split()
        return len(words) if all(word.isupper() for word in words) else 1

    @property
    def is_usable(self) -> bool:
        return not (self.deprecated or self.removed)


class Flags:
    def __init__(self, entries: tuple[Flag, ...]) -> None:
        self.entries = entries
        self._index: dict[str, Flag] = {}
        for entry in entries:
            for name in entry.names:
                self._index.setdefault(name.lstrip("-"), entry)

    def find(self, name: str) -> Flag | None:
        """Find an option by any of its spellings, with or without dashes."""
        return self._index.get(plain_name(name))

    def nearest(self, name: str) -> str | None:
        return nearest(name, self._index)


def plain_name(name: str) -> str:
    """Return a name in the form of settings: no leading dashes, no underscores.

    Source: common/arg.cpp, too, turns underscores of long options into dashes.
    """
    return name.lstrip("-").replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(
        plain_name(name), [name for name in known if len(name) > 3], n=1
    )
    return found[0] if found else None


# Two formats are parsed: the output of `llama-server --help`, and the lists in `vendor/help/`, most
# of which were derived from the sources of a build. A derived list starts with a `#` line and has
# neither defaults nor descriptions; an option whose kind it does not show has the kind `unknown`.


@functools.lru_cache(maxsize=4)  # every plan of a model needs the options of its engine
def parse(text: str) -> Flags:
    """Parse the options of a help text, and skip other lines."""
    is_derived = text.startswith("#")
    blocks: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("-") and not line.startswith("-----"):
            blocks.append((line, []))
        elif line.startswith(" ") and blocks:
            blocks[-1][1].append(line.strip())
    return Flags(tuple(_flag(head, rest, is_derived=is_derived) for head, rest in blocks))


def _flag(head: str, rest: list[str], *, is_derived: bool) -> Flag:
    names = _NAMES.match(head)
    tail = (_DERIVED if is_derived else _PRINTED).fullmatch(
        head.rstrip(), names.end() if names else 0
    )
    hint, first = tail.groups() if tail else (None, None)
    lines = [line for line in [first or "", *rest] if line]
    text = " ".join(lines)
    default = _search(_DEFAULT, text)
    choices = _choices(hint, lines, default)
    removed = _search(_REMOVED, text)
    return Flag(
        names=tuple(re.split(r",\s+", names.group())) if names else (),
        kind="unknown" if is_derived and not hint else _kind(hint, choices, default),
        hint=hint,
        choices=choices,
        default=default,
        env=_search(_ENV, text),
        deprecated=text if "DEPRECATED" in text else None,
        removed=removed,
        help="\n".join(lines),
    )


def _search(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return found.group(1).strip() if found else None


def _choices(hint: str | None, lines: list[str], default: str | None) -> tuple[str, ...]:
    hint = hint or ""
    text = " ".join(lines)
    if listed := _CHOICE_HINT.fullmatch(hint):
        return tuple(re.split(r"[|,]", listed.group(1)))
    if _LIST_HINT.fullmatch(hint):
        return tuple(hint.split(","))
    if allowed := _search(_ALLOWED, text):
        return tuple(allowed.split(", "))
    if words := _search(_WORDS, text):
        return tuple(re.findall(r"'(\w+)'", words))
    return _bullets(lines, default) if hint in _BULLET_HINTS else ()


def _bullets(lines: list[str], default: str | None) -> tuple[str, ...]:
    found = [bullet.group(1) for line in lines if (bullet := _BULLET.match(line))]
    # The bullets of --reasoning-format leave out its own default.
    extra = [default] if found and default and default not in found else []
    return (*found, *extra)


def _kind(hint: str | None, choices: tuple[str, ...], default: str | None) -> Kind:
    if hint is None:
        return "switch"
    if hint in _INT_HINTS or (hint in _NUMBER_HINTS and re.fullmatch(r"-?\d+", default or "")):
        return "int"
    if hint in _NUMBER_HINTS:
        return "number"
    if "," in hint and not hint.startswith(("{", "[")):
        return "list"
    if choices:
        return "enum"
    return "path" if hint in _PATH_HINTS else "string"


def recorded_builds() -> Mapping[str, Path]:
    """Return the recorded help texts by build, such as `b10434`, the oldest first."""
    paths = (shipped_directory("vendor") / "help").glob("b*.txt")
    return {path.stem: path for path in sorted(paths, key=lambda path: int(path.stem[1:]))}


# Options that llama.cpp has got since the newest recorded build, as its help prints them. Source:
# llama.cpp, pull request 29887 (the cache for experts in main memory), common/arg.cpp.
_NEWER: Final = """\
--moe-cache-mib N                       GPU cache size in MiB for the MoE experts kept in the CPU
                                        (default: 0, disabled)
                                        (env: LLAMA_ARG_MOE_CACHE_MIB)
"""


@functools.cache
def recorded_names() -> frozenset[str]:
    """Return every option name of any recorded build, or of a newer one, without dashes."""
    texts = (_NEWER, *(path.read_text("utf-8") for path in recorded_builds().values()))
    heads = (line for text in texts for line in text.splitlines() if line.startswith("-"))
    found = (_NAMES.match(head) for head in heads)
    names = (name for match in found if match for name in re.split(r",\s+", match.group()))
    return frozenset(bare for name in names if (bare := name.lstrip("-")))  # not "----- …"


@functools.cache
def newest_flags() -> Flags:
    """Return the options of the newest recorded build, and those of newer ones."""
    *_, newest = recorded_builds().values()
    return Flags((*parse(newest.read_text("utf-8")).entries, *parse(_NEWER).entries))


def recorded_flag(name: str) -> Flag | None:
    """Find an option in the newest recorded build that has it."""
    if (flag := newest_flags().find(name)) or plain_name(name) not in recorded_names():
        return flag
    return _recorded_flags()[plain_name(name)]


@functools.cache
def _recorded_flags() -> Mapping[str, Flag]:
    builds = (parse(path.read_text("utf-8")) for path in recorded_builds().values())
    entries = (entry for build in builds for entry in build.entries)
    return {name.lstrip("-"): entry for entry in entries for name in entry.names}

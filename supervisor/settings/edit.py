"""Changes `corral.toml` in place, keeping comments, order and layout, and writes the first file."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomlkit
from tomlkit.exceptions import TOMLKitError

from proxy.common.toml_text import parse_toml
from supervisor.errors import SettingsInvalid, access_denied
from supervisor.settings.load import Loaded, merge
from supervisor.settings.reference import DIRECTIVE
from supervisor.system.files import back_up, rewrite, write_atomic
from supervisor.system.paths import make_private
from supervisor.system.toml_file import has_key

Table = MutableMapping[str, Any]

_NOT_SAFE: Final = "the settings file cannot be changed safely"
_AS_OWNER: Final = "change it as its owner, then run corral reload"
_BY_HAND: Final = "nothing was changed; correct it by hand, with corral config check"


# The new text, and lines that tell people the changes.
Edit = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A settings file that was changed, with its old text; `lines` are for people."""

    path: Path
    before: str
    lines: tuple[str, ...]
    backup: Path

    def restore(self) -> None:
        """Restore the old text; raises AccessDenied."""
        with access_denied(f"{self.path} cannot be changed", _AS_OWNER):
            rewrite(self.path, self.before)
            self.backup.unlink(missing_ok=True)


def change_file(path: Path, edit: Callable[[str], Edit]) -> ChangedFile:
    """Apply an edit to a settings file, and keep a backup.

    If `edit` raises SettingsInvalid, nothing is changed. Raises AccessDenied: no access to the
    file.
    """
    with access_denied(f"{path} cannot be changed", _AS_OWNER):
        text = path.read_text("utf-8")
        after, lines = edit(text)
        backup = back_up(path)
        rewrite(path, after)
    return ChangedFile(path, text, lines, backup)


def write_file(path: Path, edit: Callable[[str], Edit]) -> tuple[str, ...]:
    """Apply an edit to a settings file, made if missing, without a backup; return the edit's lines.

    Raises as `change_file`.
    """
    with access_denied(f"{path} cannot be changed", _AS_OWNER):
        is_new = not path.exists()
        text, lines = edit("" if is_new else path.read_text("utf-8"))
        if is_new:
            make_private(path.parent)
            write_atomic(path, text)
        else:
            rewrite(path, text)
    return lines


def write_models(
    path: Path, loaded: Loaded, names: Iterable[str], changes: Mapping[str, Any]
) -> tuple[str, ...]:
    """Write models that the settings file lacks, and changes of their tables; as `write_file`."""
    values: dict[tuple[str, ...], object] = {}
    for name in names:
        if loaded.origins.get(f"models.{name}.path") not in {"file", "environment"}:
            values["models", name, "path"] = str(loaded.settings.models[name].path)
        if "profile" in changes:
            values["models", name, "profile"] = changes["profile"]
        for flag, value in changes.get("flags", {}).items():
            values["models", name, "flags", flag] = value

    def edit(text: str) -> Edit:
        lines: tuple[str, ...] = ()
        for key, value in values.items():
            text, line = with_value(text, key, value)
            lines += line
        return first_valid([(text, lines)], path)

    return tuple(f"{path}: {line}" for line in write_file(path, edit)) if values else ()


def first_valid(edits: Iterable[Edit], path: Path) -> Edit:
    """Return the first edit with valid settings; raises the error of the first edit."""
    errors = []
    for edit in edits:
        try:
            merge(parse_toml(edit[0].encode()), path)
        except SettingsInvalid as error:
            errors.append(error)
        else:
            return edit
    raise SettingsInvalid(
        errors[0].message, hint="nothing was changed; corral config show lists every setting"
    )


def edit_text(text: str, change: Callable[[Table], None]) -> str:
    """Apply a change to the tables of a TOML text.

    The change is made twice: to the text with its layout, and to the plain values. The new text is
    used only if it parses to these values. Raises SettingsInvalid: the text is not TOML, or cannot
    be changed safely; LookupError and TypeError as `change`.
    """
    try:
        document, wanted = tomlkit.parse(text), tomllib.loads(text)
        change(document)
        change(wanted)
        after = tomlkit.dumps(document)
        is_right = tomllib.loads(after) == wanted
    except (TOMLKitError, ValueError) as error:
        raise SettingsInvalid(_NOT_SAFE, hint=_BY_HAND) from error
    if not is_right:
        raise SettingsInvalid(_NOT_SAFE, hint=_BY_HAND)
    return after


def toml(value: object) -> str:
    return tomlkit.item(value).as_string()


_KEY_HINT = (
    'quote parts with characters other than letters, digits, - and _: models."qwen3:8b".path'
)


def key_parts(key: str) -> tuple[str, ...]:
    """Parse a dotted TOML key, perhaps without quotes. Raises SettingsInvalid: it is no key."""
    parts = _as_toml(key) or tuple(key.split("."))
    if not all(parts) or not key.isprintable():
        raise SettingsInvalid(f"{key!r} is not the key of a setting", hint=_KEY_HINT)
    return parts


def _as_toml(key: str) -> tuple[str, ...]:
    if not key.isprintable() or "=" in key or "#" in key:
        return ()
    try:
        found: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    parts = []
    while isinstance(found, dict):
        ((part, found),) = found.items()
        parts.append(part)
    return tuple(parts)


def key_text(parts: Sequence[str]) -> str:
    """Format a dotted key as TOML, with quotes around the parts that need them."""
    return tomlkit.key(list(parts)).as_string()


def values_of(word: str) -> Iterator[object]:
    """Yield the possible meanings of a word of the command line: a TOML value, then a text."""
    try:
        found = tomllib.loads(f"value = {word}")
    except (tomllib.TOMLDecodeError, RecursionError):
        found = {}
    if found.keys() == {"value"}:
        yield found["value"]
    yield word


def with_value(text: str, key: tuple[str, ...], value: object) -> Edit:
    """Set a value; raises SettingsInvalid if a part of the key is not a table."""
    edit = _edit_text(text, key, functools.partial(_set, key=key, value=value))
    return edit, (f"{key_text(key)} = {toml(value)}",)


def without_value(text: str, key: tuple[str, ...]) -> Edit:
    """Remove a value or a table; raises SettingsInvalid if the file does not have it."""
    name = key_text(key)
    if not has_key(tomllib.loads(text), key):
        raise SettingsInvalid(
            f"the settings file does not set {name}",
            hint="corral config show lists every setting, and where it comes from",
        )
    return _edit_text(text, key, functools.partial(_remove, key=key)), (f"{name} is not set",)


def _edit_text(text: str, key: tuple[str, ...], change: Callable[[Table], None]) -> str:
    try:
        return edit_text(text, change)
    except (LookupError, TypeError) as error:
        raise SettingsInvalid(f"{'.'.join(key)}: a part of this key is not a table") from error


def _set(whole: Table, key: tuple[str, ...], value: object) -> None:
    table = whole
    for depth, part in enumerate(key[:-1]):
        if part not in table:
            table[part] = tomlkit.table(is_super_table=depth < len(key) - 2)
        table = table[part]
    table[key[-1]] = value


def _remove(whole: Table, key: tuple[str, ...]) -> None:
    table = functools.reduce(lambda table, part: table[part], key[:-1], whole)
    del table[key[-1]]
    if not table and key[:-1]:
        _remove(whole, key[:-1])


_HEAD: Final = """\
{directive}
# Settings of llama-corral; `corral config show` lists all of them, `corral reload` applies changes.
# This machine: {machine}.

[proxy]
listen = "127.0.0.1:8080"
{default}
# api_keys_file = "keys.toml"  # then clients need a key: corral key add NAME

# [supervisor]
# memory_budget = "12 GiB"     # main memory of all models together; unset: 95 % of it
"""
_EXAMPLE: Final = """\

# [models.chat]                # the name that clients use
# path = "~/models/chat.gguf"
"""
_CHOICES: Final = """\
# profile = "low-latency"      # corral profile list
# ttl_s = 900                  # unload it after this long without a request
"""


@dataclass(frozen=True, slots=True)
class InitialModel:
    """A model for the first settings file."""

    name: str
    table: Mapping[str, Any]  # the content of `[models.NAME]`
    facts: str  # a description of the model and its memory, for a comment
    problem: str | None = None  # why it cannot be served here, or None
    generates: bool = True  # whether it generates text

    @property
    def is_usable(self) -> bool:
        return self.problem is None


def initial_text(machine: str, models: Sequence[InitialModel]) -> str:
    """Return the text of the first file; models that cannot be served here are in comments."""
    chats = [model.name for model in models if model.is_usable and model.generates]
    default = f"default_model = {toml(chats[0] if chats else 'chat')}"
    line = f"{default:30} # for requests that name no model"
    head = _HEAD.format(
        directive=DIRECTIVE, machine=machine, default=line if chats else f"# {line}"
    )
    parts = [_model(model, is_first=model.name in chats[:1]) for model in models]
    return head + ("".join(parts) or _EXAMPLE)


def _model(model: InitialModel, *, is_first: bool) -> str:
    lines = list(_lines(model, is_first=is_first))
    if model.is_usable:
        comment = f"\n# {model.facts}\n"
        return comment + "".join(f"{line}\n" for line in lines) + (_CHOICES if is_first else "")
    facts = f"# {model.facts}\n" if model.facts else ""
    return f"\n{facts}# Not served: {model.problem}\n" + "".join(f"# {line}\n" for line in lines)


def _lines(model: InitialModel, *, is_first: bool) -> Iterator[str]:
    """Yield the lines of a model's table; only the first model is loaded at the start."""
    yield f"[{key_text(('models', model.name))}]"
    for key, value in model.table.items():
        yield f"{key} = {_value(value)}"
    if not is_first:
        yield "preload = false"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {_value(member)}" for key, member in value.items())
        return f"{{ {inner} }}"
    return toml(list(value) if isinstance(value, tuple) else value)


# Keys that a trial and a model's table share, beside `flags`.
_OWN: Final = ("profile", "engine")


def remove_trial(text: str, model: str, *, is_applied: bool) -> Edit:
    """Remove a model's trial; if `is_applied`, its settings become the model's own.

    Raises SettingsInvalid: the file does not have the trial, or cannot be changed safely.
    """
    model_key, trial_key = (key_text(("models", model, *rest)) for rest in ((), ("trial",)))
    own, by_hand = list[str](), f"remove [{trial_key}] from it, then run corral reload"
    if is_applied:
        try:
            own = _own_lines(tomllib.loads(text)["models"][model]["trial"])
        except (ValueError, LookupError, TypeError) as error:
            raise SettingsInvalid(
                f"the settings file has no [{trial_key}]",
                hint="a trial of CORRAL_MODELS__… variables ends where they are set",
            ) from error
        by_hand = f"write {' and '.join(own)} into [{model_key}], {by_hand}"
    try:
        after = edit_text(text, functools.partial(_change, model=model, is_applied=is_applied))
    except (SettingsInvalid, LookupError, TypeError) as error:
        raise SettingsInvalid(_NOT_SAFE, hint=by_hand) from error
    return after, (*(f"{model_key}.{line}" for line in own), f"{trial_key} is gone")


def _change(whole: Table, model: str, *, is_applied: bool) -> None:
    table = whole["models"][model]
    trial = dict(table["trial"])
    del table["trial"]
    if not is_applied:
        return
    for name in _OWN:
        if name in trial:
            table[name] = str(trial[name])
    if flags := trial.get("flags"):
        if "flags" not in table:
            table["flags"] = tomlkit.inline_table()
        for name, value in flags.items():
            table["flags"][name] = value


def _own_lines(trial: Mapping[str, object]) -> list[str]:
    own = [f"{name} = {toml(trial[name])}" for name in _OWN if name in trial]
    flags = trial.get("flags")
    named = flags.items() if isinstance(flags, Mapping) else ()
    return [*own, *(f"flags.{name} = {toml(value)}" for name, value in named)]

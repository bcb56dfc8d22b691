"""The first `corral.toml` of a machine, with comments for its reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from supervisor.settings.edit import toml
from supervisor.settings.json_schema import DIRECTIVE

_HEAD: Final = """\
{directive}
# Settings of llama-corral; `corral config show` lists all of them, `corral reload` applies changes.
# This machine: {machine}.

[proxy]
listen = "127.0.0.1:8080"
{default}
# api_keys_file = "keys.toml"  # then clients need a key: corral key add NAME

# [supervisor]
# memory_budget = "12 GiB"     # main memory of all models together; unset: all but a twentieth
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
    """A model of the file.

    Attributes:
        table: `[models.NAME]`.
        facts: What it is and takes, for a comment.
        problem: Why it cannot be served here, or None.
        generates: Whether it generates text.
    """

    name: str
    table: Mapping[str, Any]
    facts: str
    problem: str | None = None
    generates: bool = True

    @property
    def is_usable(self) -> bool:
        return self.problem is None


def initial_text(machine: str, models: Sequence[InitialModel]) -> str:
    """Return the file; a model that cannot be served here stands in comments."""
    chats = [one.name for one in models if one.is_usable and one.generates]
    default = f"default_model = {toml(chats[0] if chats else 'chat')}"
    line = f"{default:30} # for requests that name no model"
    head = _HEAD.format(
        directive=DIRECTIVE, machine=machine, default=line if chats else f"# {line}"
    )
    parts = [_model(one, is_first=one.name in chats[:1]) for one in models]
    return head + ("".join(parts) or _EXAMPLE)


def _model(model: InitialModel, *, is_first: bool) -> str:
    lines = list(_lines(model, is_first=is_first))
    if model.is_usable:
        comment = f"\n# {model.facts}\n"
        return comment + "".join(f"{line}\n" for line in lines) + (_CHOICES if is_first else "")
    facts = f"# {model.facts}\n" if model.facts else ""
    return f"\n{facts}# Not served: {model.problem}\n" + "".join(f"# {line}\n" for line in lines)


def _lines(model: InitialModel, *, is_first: bool) -> Iterator[str]:
    """Yield the lines of its table; one model is loaded at the start, others by requests."""
    name = toml({model.name: 0}).partition(" = ")[0]
    yield f"[models.{name}]"
    for key, value in model.table.items():
        yield f"{key} = {_value(value)}"
    if not is_first:
        yield "preload = false"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {_value(one)}" for key, one in value.items())
        return f"{{ {inner} }}"
    return toml(list(value) if isinstance(value, tuple) else value)

"""Ollama's `options` and `format` as members of an engine's request. Pure.

Options that say how a model is loaded (`num_ctx`, `num_gpu`) are for `corral.toml` and ignored:
most clients send some of them with every request.

Source: Ollama, api/types.go (Options, Runner) and docs/modelfile.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from proxy.errors import BadRequest

_NAMES: Final = MappingProxyType(
    {
        name: name
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "typical_p",
            "repeat_last_n",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
            "mirostat",
            "mirostat_tau",
            "mirostat_eta",
            "seed",
            "stop",
        )
    }
    | {"num_keep": "n_keep"}
)
_LIMIT: Final = "num_predict"


def options_of(members: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options that have a value; raises BadRequest."""
    options = members.get("options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise BadRequest("the member options must be an object")
    return {name: value for name, value in options.items() if value is not None}


def sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members for these options; a wrong value is the engine's to refuse."""
    asked = {_NAMES[name]: value for name, value in options.items() if name in _NAMES}
    limit = options.get(_LIMIT)
    if isinstance(limit, int) and limit <= 0:  # as long as the model wants, or the context is
        return asked
    return asked if limit is None else {**asked, "n_predict": limit}


def ignored(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the options that change nothing here."""
    return tuple(name for name in options if name not in _NAMES and name != _LIMIT)


def schema_of(members: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the JSON schema that `format` means, None for any text; raises BadRequest."""
    match members.get("format"):
        case None | "":
            return None
        case "json":
            return {"type": "object"}
        case dict(schema):
            return schema
    raise BadRequest('the member format must be "json" or a JSON schema')


def template_options(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the member that says how to think, as chat templates read it."""
    match members.get("think"):
        case bool(is_on):
            return {"chat_template_kwargs": {"enable_thinking": is_on}}
        case str(effort) if effort:
            named = {"enable_thinking": True, "reasoning_effort": effort}
            return {"chat_template_kwargs": named}
    return {}

"""The tools of a request: the arguments that their schemas allow, and broken calls. Pure.

Arguments of a new call that the tool's schema does not allow are read leniently. The result
counts only if it has the letters and digits of the model's text in the same order: then only
punctuation was wrong. Arguments that a limit may have cut are never completed, because the half of
a command may be another command.

The arguments of earlier calls, which a client repeats, may be broken too. Most templates take
objects, and then the engine refuses this request and each further one of the conversation. They are
repaired in any case, from the beginning of the history, so that the same history always gives the
same bytes, which the next turn finds in the cache.

Source: llama-server, build 10434, `func_args_not_string` of common/chat.cpp: "Failed to parse tool
call arguments as JSON".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import orjson

from proxy.request.request import ProxyRequest, encode_members
from proxy.upstream.endpoint_kinds import EndpointKind

# json-repair reads about 1 MB/s.
_LENIENT_MAX_CHARACTERS: Final = 32 * 1024
# Of all broken calls of a history; those beyond are kept as texts.
_HISTORY_MAX_CHARACTERS: Final = 64 * 1024
_COMPLETE_ENDS: Final = ("}", "]", '"', "'")
_SIGNS: Final = re.compile(r"[\W_]+")
_WORDS: Final = re.compile(r"\b(?:None|null)\b")


class Tools:
    """The tools of a request, and the arguments that their schemas allow."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self.schemas: dict[str, Any] = {}
        tools = members.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            match tool:
                case {"function": {"name": str(name), **rest}} | {"name": str(name), **rest}:
                    self.schemas[name] = rest.get("parameters") or {}
        self._validators: dict[str, Any] = {}

    def mend(self, name: str, arguments: str, *, is_cut: bool) -> tuple[str, str]:
        """Return the arguments of a call and their fault, empty if there is none.

        They are changed if a lenient reading of them is right.
        """
        if name not in self.schemas:
            return arguments, "the request has no tool of this name"
        try:
            given = orjson.loads(arguments)
            fault = self._fault(name, given)
        except orjson.JSONDecodeError as error:
            given, fault = None, f"its arguments are not JSON: {error}"
        if fault and not (given is None and is_cut):
            for value in self._readings(name, arguments.strip(), given):
                if not self._fault(name, value):
                    return orjson.dumps(value).decode(), ""
        return arguments, fault

    def _readings(self, name: str, text: str, given: object) -> Iterator[object]:
        """Yield possible meanings of broken arguments."""
        if not text or given is None:
            if not text or text == "null":
                yield {}
            elif text.endswith(_COMPLETE_ENDS):
                read = _read_leniently(text)
                if _letters(text) == _letters(json.dumps(read, ensure_ascii=False)):
                    yield read
                    yield _coerced(read, self.schemas[name])
            return
        yield _coerced(given, self.schemas[name])

    def _fault(self, name: str, value: object) -> str:
        if not isinstance(value, dict):
            return "its arguments are no JSON object"
        validator = self._validator(name)
        error = next(validator.iter_errors(value), None) if validator else None
        if error is None:
            return ""
        place = ".".join(map(str, error.instance_path))
        return f"{place}: {error.message}" if place else f"its arguments: {error.message}"

    def _validator(self, name: str) -> Any:
        """Return the validator of a tool; None if its schema is none.

        Patterns are matched in linear time, and no reference is fetched.
        """
        if name not in self._validators:
            import jsonschema_rs  # noqa: PLC0415 (8 MB that few daemons need)

            found = None
            with suppress(ValueError):
                found = jsonschema_rs.validator_for(
                    self.schemas[name],
                    pattern_options=jsonschema_rs.RegexOptions(),
                    retriever=_refuse_reference,
                    mask="the value",
                )
            self._validators[name] = found
        return self._validators[name]


def _refuse_reference(uri: str) -> Any:
    raise ValueError(f"{uri} is not fetched")


def _letters(text: str) -> str:
    """Return the letters and digits of JSON, or of similar text, in lower case."""
    return _SIGNS.sub("", _WORDS.sub("null", text)).lower()


def _coerced(value: object, schema: object) -> object:
    """Return a value of the schema's types in place of its texts, if JSON writes it like the text.

    Models that write arguments as tags, and those that quote numbers, send `"3"` for 3.
    """
    if not isinstance(schema, dict):
        return value
    kinds = schema.get("type")
    wanted = kinds if isinstance(kinds, list) else [kinds]
    if isinstance(value, str) and kinds and "string" not in wanted:
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(value.strip().lower() if "boolean" in wanted else value)
    properties, items = schema.get("properties"), schema.get("items")
    if isinstance(value, dict) and isinstance(properties, dict):
        return {name: _coerced(inner, properties.get(name)) for name, inner in value.items()}
    if isinstance(value, list) and isinstance(items, dict):
        return [_coerced(inner, items) for inner in value]
    return value


def _read_leniently(text: str) -> object:
    """Return the most likely meaning of broken JSON; None if it is too long or has none."""
    if len(text) > _LENIENT_MAX_CHARACTERS:
        return None
    import json_repair  # noqa: PLC0415 (5 MB that few daemons need)

    with suppress(ValueError, TypeError, RecursionError):
        value = json_repair.loads(text)
        orjson.dumps(value)  # half a character, or a number of more than 64 bits
        return value
    return None


def with_mended_calls(
    kind: EndpointKind, members: Mapping[str, Any]
) -> tuple[Mapping[str, Any], int]:
    """Return the members with JSON in all calls of the history, and how many were changed.

    A call that means no object keeps its text in the member `unparsed`. Only calls of the assistant
    are read. Calls of Anthropic's API are objects.
    """
    name = {EndpointKind.CHAT: "messages", EndpointKind.RESPONSES: "input"}.get(kind, "")
    turns, mender = members.get(name), _CallMender()
    mended = [mender.mend_turn(turn) for turn in turns] if isinstance(turns, list) else turns
    return ({**members, name: mended}, mender.count) if mender.count else (members, 0)


class _CallMender:
    """Mends the calls of one history from its beginning, so that later messages change nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._characters = 0

    def mend_turn(self, turn: Any) -> Any:
        match turn:
            case {"type": "function_call"}:
                return self._mend(turn)
            case {"role": "assistant", "tool_calls": list(calls)}:
                return {**turn, "tool_calls": list(map(self._mend_call, calls))}
        return turn

    def _mend_call(self, call: Any) -> Any:
        match call:
            case {"function": dict(function)}:
                return {**call, "function": self._mend(function)}
        return call

    def _mend(self, given: dict[str, Any]) -> dict[str, Any]:
        text = given.get("arguments")
        if not isinstance(text, str) or _is_json(text):
            return given
        self.count += 1
        self._characters += len(text)
        is_short = self._characters <= _HISTORY_MAX_CHARACTERS
        value = _read_leniently(text) if is_short else None
        if not isinstance(value, dict):
            value = {"unparsed": text} if text.strip() else {}
        return {**given, "arguments": orjson.dumps(value).decode()}


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def with_mended_history(request: ProxyRequest) -> tuple[ProxyRequest, int]:
    """Return the request with JSON in all calls of earlier turns, and how many were changed.

    Its prompt, which identifies the conversation, stays the client's own.
    """
    members, count = with_mended_calls(request.kind, request.json)
    if not count:
        return request, 0
    return replace(request, json=members, body=encode_members(members)), count

"""A conversation with a model through the proxy: options, messages, and answers as they arrive."""

from __future__ import annotations

import base64
import json
import mimetypes
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import httpx

from supervisor.cli.batch import raise_refusal, translate_http_errors
from supervisor.errors import CorralError, SettingsInvalid, access_denied, did_you_mean
from supervisor.system.files import expand_home, is_regular, open_regular

_Value = str | bool | int | float
# Members of a request, by llama-server's names, and two that stand for others.
OPTIONS: Final[Mapping[str, type[_Value]]] = MappingProxyType(
    {
        "system": str,  # the system prompt
        "think": bool,  # of models whose template can turn it off
        "temperature": float,
        "top_k": int,
        "top_p": float,
        "min_p": float,
        "repeat_penalty": float,
        "presence_penalty": float,
        "frequency_penalty": float,
        "seed": int,
        "max_tokens": int,
    }
)
_BOOLEANS: Final = MappingProxyType({"on": True, "true": True, "off": False, "false": False})


def read_option(name: str, text: str) -> _Value:
    """Parse the value of an option; raises SettingsInvalid."""
    if name not in OPTIONS:
        raise SettingsInvalid(
            f"no option is named {name!r}{did_you_mean(name, OPTIONS)}",
            hint=f"options: {', '.join(OPTIONS)}",
        )
    kind = OPTIONS[name]
    try:
        return _BOOLEANS[text] if kind is bool else kind(text)
    except (ValueError, KeyError):
        wanted = {bool: "on or off", int: "an integer"}.get(kind, "a number")
        raise SettingsInvalid(f"{name} is {wanted}, not {text!r}") from None


_IMAGE_TYPES: Final = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})
_IMAGE_MAX_BYTES: Final = 32 * 1024**2
# A path in quotes, or with escaped spaces: so terminals write a file that is dropped on them.
_PATH: Final = re.compile(r""""([^"\n]+)"|'([^'\n]+)'|((?:\\.|[^\s\\"'])+)""")


def take_images(text: str) -> tuple[str, list[Path]]:
    """Return the text without the paths of image files, and these."""
    images: list[Path] = []

    def take(found: re.Match[str]) -> str:
        name = found[1] or found[2] or re.sub(r"\\(.)", r"\1", found[3])
        path = expand_home(Path(name))
        if path.suffix.lower() not in _IMAGE_TYPES or not is_regular(path):
            return found[0]
        images.append(path)
        return ""

    return _PATH.sub(take, text).strip(), images


def _content(text: str, images: list[Path]) -> str | list[Mapping[str, Any]]:
    """Return the content of a message; raises AccessDenied, or SettingsInvalid for a huge image."""
    if not images:
        return text
    parts: list[Mapping[str, Any]] = [{"type": "text", "text": text}] if text else []
    for path in images:
        with access_denied(f"{path} cannot be read"), open_regular(path) as file:
            content = file.read(_IMAGE_MAX_BYTES + 1)
        if len(content) > _IMAGE_MAX_BYTES:
            raise SettingsInvalid(
                f"{path} has more than {_IMAGE_MAX_BYTES >> 20} MiB", hint="send a smaller image"
            )
        kind = mimetypes.guess_type(path.name)[0]
        url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer, or of the model's thoughts before it.

    `progress`: the engine computes the prompt; the text says how far it is.
    """

    kind: Literal["text", "thought", "progress"]
    text: str


# A shorter prompt is computed before its progress could be read.
_PROGRESS_FROM_MS: Final = 500


@dataclass(slots=True)
class Answer:
    """An answer as far as it has arrived; `finish_reason`: None until its end."""

    text: str = ""
    thoughts: str = ""
    request_id: str | None = None
    finish_reason: str | None = None
    timings: Mapping[str, Any] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> Iterator[Piece]:
        """Take an event of the stream; raises CorralError if it is an error."""
        if error := event.get("error"):
            raise CorralError(f"the answer broke off: {error['message']}")
        progress = event.get("prompt_progress")
        if progress and progress["time_ms"] >= _PROGRESS_FROM_MS:
            share = progress["processed"] / max(1, progress["total"])
            yield Piece("progress", f"reading the prompt, {share:.0%}")
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if thought := delta.get("reasoning_content"):
                self.thoughts += thought
                yield Piece("thought", thought)
            if text := delta.get("content"):
                self.text += text
                yield Piece("text", text)
        self.timings = event.get("timings", self.timings)


class Chat:
    """A conversation with a model; `options` are those of the next request."""

    def __init__(self, http: httpx.Client, model: str, options: Mapping[str, _Value]) -> None:
        self.model = model
        self.options = {**options}
        self.answer = Answer()  # the latest
        self._http = http
        self._messages: list[Mapping[str, Any]] = []

    def clear(self) -> None:
        """Begin another conversation."""
        self._messages.clear()

    def ask(self, text: str, images: list[Path]) -> Generator[Piece]:
        """Send a message, and yield the answer as it arrives.

        If the iterator is closed early, the engine stops, and the conversation continues from the
        text that has arrived. A message without an answer is not kept. Raises CorralError.
        """
        message = {"role": "user", "content": _content(text, images)}
        body = self._body(message)
        self.answer = answer = Answer()
        try:
            with (
                translate_http_errors("corral status shows whether it runs; then ask again"),
                self._http.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                answer.request_id = response.headers.get("x-request-id")
                raise_refusal(response)
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        yield from answer.add(json.loads(line.removeprefix("data: ")))
        finally:
            if answer.text:
                reply = {"role": "assistant", "content": answer.text}
                self._messages += [message, reply]

    def _body(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        members: dict[str, Any] = {**self.options}
        system, think = members.pop("system", ""), members.pop("think", None)
        if think is not None:
            members["chat_template_kwargs"] = {"enable_thinking": think}
        first = [{"role": "system", "content": system}] if system else []
        messages = [*first, *self._messages, message]
        asked = {"model": self.model, "messages": messages}
        return {**members, **asked, "stream": True, "return_progress": True}

"""What a response of the hub that is not a success means. Pure.

Source: huggingface_hub, utils/_http.py, hf_raise_for_status, for X-Error-Code and X-Error-Message;
the hub answers 401 for a repository that does not exist, unless a token is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.errors import CorralError, DownloadFailed, HubAccessDenied, NoSuchModel
from supervisor.hub.retry import ASKED_WAIT_MAX_S, Interruption

_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
_TOKENS: Final = "https://huggingface.co/settings/tokens"
_TEXT_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: of what, at which page of the hub, and whether with a token."""

    what: str
    page: str
    has_token: bool


def refusal(status: int, headers: Mapping[str, str], asked: Asked) -> CorralError | Interruption:
    """Return the error to raise; an Interruption where another attempt may succeed."""
    code = headers.get("x-error-code", "")
    if status in _TRANSIENT:
        return _transient(status, headers)
    if code == "GatedRepo":
        return _gated(asked)
    if status == 404 or code in {"RepoNotFound", "RevisionNotFound", "EntryNotFound"}:
        return _missing(code, asked)
    if status in {401, 403}:
        return _denied(status, headers, asked)
    said = _said(headers)
    return DownloadFailed(
        f"the hub answered {status} for {asked.what}{said}", hint="try again later"
    )


def _transient(status: int, headers: Mapping[str, str]) -> Interruption:
    asked = headers.get("retry-after", "")
    wait_s = float(asked) if asked.isdecimal() else None
    if status != 429:
        return Interruption(f"the server answered {status}", wait_s)
    reason = "the server answered 429, too many requests"
    if wait_s and wait_s > ASKED_WAIT_MAX_S:
        reason += f", and asks to wait {wait_s:.0f} s"
    return Interruption(reason, wait_s)


def _gated(asked: Asked) -> CorralError:
    then = (
        "; the account of your token has no access yet"
        if asked.has_token
        else f", then set HF_TOKEN to a token from {_TOKENS}"
    )
    return HubAccessDenied(
        f"{asked.what} is gated: its owner wants conditions to be accepted",
        hint=f"accept them at {asked.page}{then}",
    )


def _missing(code: str, asked: Asked) -> CorralError:
    if code == "RevisionNotFound":
        return NoSuchModel(f"{asked.what} has no such branch, tag or commit")
    if code == "EntryNotFound":
        return NoSuchModel(f"{asked.what} is not on the hub", hint=f"see {asked.page}")
    private = (
        "your token has no access to it if it is private"
        if asked.has_token
        else "if it is private, set HF_TOKEN"
    )
    return NoSuchModel(
        f"the hub has no repository {asked.what}, or does not show it to you",
        hint=f"check the spelling (corral model search WORDS); {private}",
    )


def _denied(status: int, headers: Mapping[str, str], asked: Asked) -> CorralError:
    said = _said(headers)
    if status == 401 and asked.has_token:
        return HubAccessDenied(
            f"the hub does not accept your token for {asked.what}{said}",
            hint=f"set HF_TOKEN to a valid one ({_TOKENS}), or unset it for public models",
        )
    return HubAccessDenied(
        f"the hub denies access to {asked.what} ({status}){said}",
        hint=f"see {asked.page}; for a private repository set HF_TOKEN",
    )


def _said(headers: Mapping[str, str]) -> str:
    text = headers.get("x-error-message", "")[:_TEXT_MAX]
    return f": {text}" if text else ""

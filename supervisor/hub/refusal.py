"""What a response of the hub that is not a success means. Pure.

Source: huggingface_hub, utils/_http.py, hf_raise_for_status, for X-Error-Code and X-Error-Message;
the hub answers 401 for a repository that does not exist, unless a token is sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.errors import CorralError, DownloadFailed, HubAccessDenied, NoSuchModel
from supervisor.hub.retry import ASKED_WAIT_MAX_S, Interruption

_RATE_LIMIT: Final = re.compile(r";\s*r=0\s*;\s*t=(\d{1,6})(?!\d)")
_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
_TOKENS: Final = "https://huggingface.co/settings/tokens"
_TEXT_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """A request.

    Attributes:
        repo: OWNER/NAME; empty of another server than the hub.
        what: The file, or else the repository.
        page: Where a browser shows it.
        has_token: Whether the hub's token came with it.
    """

    repo: str
    what: str
    page: str
    has_token: bool


def refusal(status: int, headers: Mapping[str, str], asked: Asked) -> CorralError | Interruption:
    """Return the error to raise; an Interruption where another attempt may succeed."""
    code = headers.get("x-error-code", "")
    if status in _TRANSIENT:
        return _transient(status, headers)
    if not asked.repo:
        return _elsewhere(status, asked)
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


def _elsewhere(status: int, asked: Asked) -> CorralError:
    kind = NoSuchModel if status in {404, 410} else DownloadFailed
    return kind(f"the server answered {status} for {asked.page}", hint="check the URL in a browser")


def _transient(status: int, headers: Mapping[str, str]) -> Interruption:
    wait_s = _asked_wait_s(headers)
    if status != 429:
        return Interruption(f"the server answered {status}", wait_s)
    reason = "the server answered 429, too many requests"
    if wait_s and wait_s > ASKED_WAIT_MAX_S:
        reason += f", and asks to wait {wait_s:.0f} s"
    return Interruption(reason, wait_s)


def _asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Source: RFC 9110, Retry-After; the hub's "Rate limits", whose header is `"api";r=0;t=55`."""
    if (asked := headers.get("retry-after", "")).isdecimal():
        return float(asked)
    found = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return float(found[1]) if found else None


def _gated(asked: Asked) -> CorralError:
    then = (
        "; the account of your token has no access yet"
        if asked.has_token
        else f", then set HF_TOKEN to a token from {_TOKENS}"
    )
    return HubAccessDenied(
        f"{asked.repo} is gated: its owner wants conditions to be accepted",
        hint=f"accept them at {asked.page}{then}",
    )


def _missing(code: str, asked: Asked) -> CorralError:
    if code == "RevisionNotFound":
        return NoSuchModel(
            f"{asked.repo} has no such branch, tag or commit", hint=f"see {asked.page}"
        )
    if code == "EntryNotFound":
        return NoSuchModel(f"{asked.repo} has no {asked.what}", hint=f"see {asked.page}")
    private = (
        "your token has no access to it if it is private"
        if asked.has_token
        else "if it is private, set HF_TOKEN"
    )
    return NoSuchModel(
        f"the hub has no repository {asked.repo}, or does not show it to you",
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

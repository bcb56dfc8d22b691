"""Single requests to the hub and to servers of files, through huggingface_hub's session.

That session has the user's proxy, certificates, token and offline mode (HF_ENDPOINT, HF_TOKEN,
HF_HOME, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

# Read while it is imported.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import httpx2
from huggingface_hub import ModelInfo, constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, get_session

from supervisor import __version__
from supervisor.errors import AccessDenied, CorralError, DownloadFailed, HubAccessDenied
from supervisor.hub.reference import without_secrets
from supervisor.hub.refusal import Asked, refusal
from supervisor.hub.retry import Interruption

__all__ = [
    "ModelInfo",
    "RepoSibling",
    "cache_root",
    "default_endpoint",
    "is_offline",
    "stream",
]

_TIMEOUT: Final = httpx2.Timeout(30.0, connect=10.0)
_AGENT: Final = "llama-corral"


def is_offline() -> bool:
    return bool(constants.HF_HUB_OFFLINE)


def cache_root() -> Path:
    """The Hugging Face cache of this user: HF_HUB_CACHE, or below HF_HOME."""
    return Path(constants.HF_HUB_CACHE)


def default_endpoint() -> str:
    """HF_ENDPOINT, or huggingface.co."""
    return str(constants.ENDPOINT)


@contextmanager
def stream(
    url: str, endpoint: str, name: str, headers: Mapping[str, str], parameters: Mapping[str, Any]
) -> Iterator[httpx2.Response]:
    """Request a URL, and yield the response before its body.

    The token goes to the hub alone: the session drops it where it is redirected elsewhere.

    Args:
        url: What to get.
        endpoint: Of the hub.
        name: Of the repository or file, for messages.
        headers: Those of this request.
        parameters: The query.

    Raises:
        Interruption: Another attempt may succeed.
        CorralError: The server refuses.
    """
    sent = {**_headers(url, endpoint), **headers}
    with (
        _transport(url),
        get_session().stream(
            "GET", url, params=dict(parameters) or None, headers=sent, timeout=_TIMEOUT
        ) as response,
    ):
        if response.status_code not in {200, 206, 416}:
            raise _refusal(response, endpoint, name, has_token="authorization" in sent)
        yield response


def _headers(url: str, endpoint: str) -> dict[str, str]:
    is_hub = url.startswith(f"{endpoint}/")
    token = None if is_hub else False
    try:
        found = build_hf_headers(token=token, library_name=_AGENT, library_version=__version__)
    except (OSError, ValueError) as error:
        raise AccessDenied(
            f"the token of the hub cannot be read: {error}",
            hint="check HF_HOME and HF_TOKEN_PATH, or set HF_TOKEN",
        ) from error
    return dict(found)


def _refusal(
    answer: httpx2.Response, endpoint: str, name: str, *, has_token: bool
) -> CorralError | Interruption:
    first, last = str(answer.history[0].url if answer.history else answer.url), str(answer.url)
    if not first.startswith(f"{endpoint}/"):
        asked = Asked("", name, without_secrets(first), has_token)
        return refusal(answer.status_code, answer.headers, asked)
    if not last.startswith(f"{endpoint}/"):
        # The link to the download server has expired; the hub gives another.
        return Interruption(f"the download server answered {answer.status_code}")
    found = re.match(r"/(?:api/models/)?([^/]+/[^/]+)(?:/|$)", first.removeprefix(endpoint))
    repo = found[1] if found else name
    asked = Asked(repo, name, f"{endpoint}/{repo}", has_token)
    return refusal(answer.status_code, answer.headers, asked)


@contextmanager
def _transport(url: str) -> Iterator[None]:
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise DownloadFailed(
            f"offline mode is on, so {url} was not requested", hint="unset HF_HUB_OFFLINE"
        ) from error
    except UnicodeEncodeError as error:
        raise HubAccessDenied(
            "the token of the hub has characters that no token has", hint="set HF_TOKEN again"
        ) from error
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise DownloadFailed(
            f"{url} cannot be requested: {error}", hint="check HF_ENDPOINT"
        ) from error
    except httpx2.TooManyRedirects as error:
        raise DownloadFailed(f"{url} redirects without an end", hint="check the URL") from error
    except httpx2.HTTPError as error:
        if _is_unresolved(error):
            reason = f"the name {urlsplit(url).hostname} has no address ({error})"
            raise Interruption(reason, is_unresolved=True) from error
        raise Interruption(str(error) or type(error).__name__) from error


def _is_unresolved(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None

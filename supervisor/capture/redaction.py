"""Takes keys out of requests. Pure.

Of headers and query parameters only those that are known to hold no key are kept. In a body, the
texts of members whose names say that they are keys are replaced; what a user wrote into a prompt
stays, because a capture is of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

REDACTED: Final = "[redacted]"
_HEADERS: Final = frozenset(
    {
        "accept",
        "anthropic-beta",
        "anthropic-version",
        "content-type",
        "openai-beta",
        "user-agent",
    }
)
_PARAMETERS: Final = frozenset({"autoload", "beta", "model"})
_SECRET_NAMES: Final = frozenset(
    {
        "access_key",
        "access_token",
        "api_key",
        "apikey",
        "auth_token",
        "authorization",
        "bearer_token",
        "client_secret",
        "cookie",
        "hf_token",
        "passwd",
        "password",
        "private_key",
        "proxy_authorization",
        "refresh_token",
        "secret",
        "secret_key",
        "set_cookie",
        "x_api_key",
    }
)


def kept_headers(fields: Mapping[str, str]) -> dict[str, str]:
    # As plain texts: aiohttp's names are of a subclass, which orjson refuses.
    return {str(name): value for name, value in fields.items() if name.lower() in _HEADERS}


def kept_query(query: str) -> str:
    """Return a query string with the values of unknown parameters replaced."""
    pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=None)
    return urlencode([(name, one if name in _PARAMETERS else REDACTED) for name, one in pairs])


def without_keys(value: Any) -> Any:
    """Return a JSON value in which texts under the names of keys are replaced."""
    if isinstance(value, dict):
        return {name: _member(name, inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_keys(inner) for inner in value]
    return value


def is_secret_name(name: str) -> bool:
    return name.lower().replace("-", "_") in _SECRET_NAMES


def _member(name: str, value: Any) -> Any:
    if isinstance(value, str) and is_secret_name(name):
        return REDACTED
    if name == "headers" and isinstance(value, dict):  # of a tool on another server
        return dict.fromkeys(value, REDACTED)
    return without_keys(value)

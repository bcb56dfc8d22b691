"""Users whom a trusted reverse proxy has signed in, such as oauth2-proxy by OpenID Connect.

The proxy names the user and the user's groups in header fields. They count only in requests from
its addresses; in any other request they are ignored, as if it had none. A field that is there twice
may have been sent by the client beside that of the proxy, so such a request is refused.

A user has the rights and limits of one entry of the keys file, by group. Names of users begin with
`user:`, which no key of the file does, so no user is taken for a key.

A browser adds the user's identity to requests of any page, as it does with cookies. So among
requests from the proxy only those of its own pages pass, and those of programs, which send neither
Origin nor Sec-Fetch-Site. What starts at another site may only open the dashboard: signing in ends
with a redirect from the identity provider.

Source: oauth2-proxy, "Headers"; W3C Fetch Metadata Request Headers, section 2.4.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from aiohttp import web

from proxy.auth.keys_file import Key
from proxy.errors import Forbidden, Unauthorized, quote
from proxy.settings import AuthProxySettings

USER: Final = "user:"
ANY_GROUP: Final = "*"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+|-]{0,127}")
_GROUPS_MAX_CHARACTERS: Final = 16_384
# Their sessions and batches find their keys.
_USERS_MAX: Final = 4096


class AuthProxy:
    def __init__(self, settings: AuthProxySettings) -> None:
        self._settings = settings
        self._networks = [ipaddress.ip_network(address) for address in settings.addresses]
        self._roles: dict[str, str] = {}  # of the latest users, by name

    def is_sender(self, request: web.BaseRequest) -> bool:
        """Return whether a request comes from an address of the proxy, and not from a client."""
        try:
            sender = ipaddress.ip_address((request.remote or "").removeprefix("::ffff:"))
        except ValueError:
            return False
        return any(sender in network for network in self._networks)

    def key_of(self, request: web.BaseRequest, keys: Sequence[Key]) -> Key | None:
        """Return the user's key; None if the proxy did not send the request, or names no user.

        Raises:
            Unauthorized: The fields are not those of one user.
            Forbidden: No group of the user may use this server.
        """
        names = request.headers.getall(self._settings.user_header, ())
        if not names or not self.is_sender(request):
            return None
        groups = request.headers.getall(self._settings.groups_header, ())
        if len(names) > 1 or len(groups) > 1:
            raise Unauthorized(
                f"several {self._settings.user_header} or {self._settings.groups_header} fields: "
                "the proxy must remove those of clients"
            )
        if not _NAME.fullmatch(names[0]) or len("".join(groups)) > _GROUPS_MAX_CHARACTERS:
            raise Unauthorized(
                f"{self._settings.user_header} {quote(names[0])} is not the name of a user"
            )
        name = f"{USER}{names[0]}"
        given = {ANY_GROUP, *(group.strip() for group in "".join(groups).split(","))}
        role = next((role for group, role in self._settings.roles.items() if group in given), None)
        if role is None:
            raise Forbidden(
                f"{name} is in no group that may use this server (roles in [proxy.auth_proxy])"
            )
        if (key := _key_of(name, role, keys)) is None:
            raise Forbidden(f"the role of {name} is gone: the keys file has no [keys.{role}]")
        if self._roles.pop(name, None) is None and len(self._roles) >= _USERS_MAX:
            del self._roles[next(iter(self._roles))]
        self._roles[name] = role
        return key

    def knows(self, name: str) -> bool:
        """Return whether a name is that of one of the latest users."""
        return name in self._roles

    def find_key(self, name: str, keys: Sequence[Key]) -> Key | None:
        """Return the key of one of the latest users; None for others."""
        role = self._roles.get(name)
        return _key_of(name, role, keys) if role else None


def _key_of(name: str, role: str, keys: Sequence[Key]) -> Key | None:
    entry = next((key for key in keys if key.name == role), None)
    return replace(entry, name=name, digest=b"") if entry else None

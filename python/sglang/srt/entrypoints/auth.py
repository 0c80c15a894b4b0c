"""--api-key and --admin-api-key: which request may do what."""

from __future__ import annotations

import hmac
from enum import Enum, auto

from sglang.srt.server_args import ServerArgs


class Access(Enum):
    """What a route asks for: nothing (probes and scrapers have no key), a key, or the administrator's."""

    FREE = auto()
    NORMAL = auto()
    ADMIN = auto()


class AuthenticationError(Exception):
    """A request without the key that its route asks for (HTTP 401)."""


class ApiKeys:
    """The keys of a server. Where there is an administrator's key, the other one does not open what asks for it; where
    there is none, the other one does."""

    def __init__(self, args: ServerArgs) -> None:
        self._wanted = {
            Access.FREE: None,
            Access.NORMAL: args.api_key,
            Access.ADMIN: args.admin_api_key or args.api_key,
        }

    def check(self, access: Access, authorization: str | None) -> None:
        """``authorization``: the header, as Starlette decodes it (Latin-1).

        Raises:
            AuthenticationError: it has not the key; the text says nothing of any key.
        """
        wanted = self._wanted[access]
        if wanted is None:
            return
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), wanted.encode()):
            whose = "administrator's" if access is Access.ADMIN else "server's"
            raise AuthenticationError(
                f"This needs the {whose} key in the header 'Authorization: Bearer KEY'; it is absent or wrong."
            )

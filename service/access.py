"""Who a caller is, and whether a service is open to them. Asked once for every call, before its message is read.

With a tokens file, a bearer token says both. Without one, everybody may do everything that the server offers; a client
certificate then gives a name, so that one client's requests are not another's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from service.callers import ANYBODY, Caller, Permission
from service.refusals import PermissionDeniedError, UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import grpc

    from service.tokens import TokenTable

AUTHORIZATION: Final = "authorization"
SCHEME: Final = "bearer"
CERTIFICATE_PREFIX: Final = "certificate:"


class Access:
    """Answers for one server."""

    def __init__(self, tokens: Callable[[], TokenTable] | None = None) -> None:
        """`tokens` gives the newest table; None asks nobody for one."""
        self._tokens = tokens

    @property
    def asks_tokens(self) -> bool:
        """Whether callers must present a token."""
        return self._tokens is not None

    def require(self, permission: Permission, metadata: Iterable[tuple[str, str | bytes]], service: str) -> Caller:
        """Refuse a call to `service` that its caller may not make; else return whose token it is.

        Raises:
            UnauthenticatedError: there is no token, or nobody has it.
            PermissionDeniedError: its owner lacks `permission`.
        """
        caller = self._by_token(metadata)
        if permission not in caller.permissions:
            raise PermissionDeniedError(service, permission.value)
        return caller

    def caller_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """Whose call it is.

        Raises:
            UnauthenticatedError: the token has been taken back meanwhile.
        """
        if self._tokens is not None:
            return self._by_token(context.invocation_metadata() or ())
        identities = context.peer_identities()
        if not identities:
            return ANYBODY
        return Caller(name=CERTIFICATE_PREFIX + next(iter(identities)).decode("utf-8", "replace"))

    def _by_token(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        if self._tokens is None:
            return ANYBODY
        values = [value for key, value in metadata if key == AUTHORIZATION]
        if len(values) != 1 or not isinstance(values[0], str):
            raise UnauthenticatedError(f"metadata {AUTHORIZATION!r} must hold one bearer token")
        scheme, _, token = values[0].partition(" ")
        caller = self._tokens().caller_of(token.strip()) if scheme.lower() == SCHEME else None
        if caller is None:
            raise UnauthenticatedError("the bearer token is not known")
        return caller

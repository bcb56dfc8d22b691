"""One limit that is held, or a refusal that names it."""

from __future__ import annotations

from proxy.errors import LimitExceeded
from proxy.request_limits.limits import RequestLimits


class Limit:
    """Holds the limits of one request."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits

    def __call__(self, member: str, what: str, amount: float, setting: str) -> None:
        """Do nothing where there is not too much of it.

        Args:
            member: The member of the body.
            what: What is counted, as a phrase behind a number.
            amount: How much there is.
            setting: The limit's name in `RequestLimits`.

        Raises:
            LimitExceeded: There is more than the limit.
        """
        limit: int = getattr(self._limits, setting)
        if amount > limit:
            raise LimitExceeded(member, what, amount, limit, setting)

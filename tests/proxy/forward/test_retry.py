"""Which error of an instance is tried again, how often and where."""

from __future__ import annotations

import pytest

from proxy.errors import (
    NodeUnconnected,
    TrialCrashed,
    TrialFailed,
    UpstreamConnectFailed,
    UpstreamCrashed,
    UpstreamDraining,
    UpstreamFailed,
    UpstreamKilled,
    UpstreamLoading,
    UpstreamShutDown,
    UpstreamSilent,
    UpstreamUnavailable,
)
from proxy.forward.forward import Tries, next_try

SECOND = Tries(("chat.1",), is_second=True)
MOVED = Tries(("chat.1",), moves=1)
AT_THE_LIMIT = Tries(("a", "b", "c", "d"), moves=4)


@pytest.mark.parametrize(
    ("error", "first", "again_there", "at_the_limit", "committed"),
    [
        (UpstreamFailed("no JSON"), None, None, None, None),
        (UpstreamCrashed("it crashed"), None, None, None, None),
        (UpstreamConnectFailed("chat.1", "refused"), SECOND, SECOND, SECOND, None),
        (UpstreamLoading("chat.1", "loads"), SECOND, SECOND, SECOND, None),
        (TrialFailed("chat.1", "answered 500"), SECOND, SECOND, SECOND, None),
        (UpstreamShutDown("chat.1"), SECOND, SECOND, SECOND, None),
        (UpstreamKilled("chat.1"), SECOND, SECOND, SECOND, None),
        (TrialCrashed("chat.1"), SECOND, SECOND, SECOND, None),
        (
            UpstreamSilent("chat.1", "is silent"),
            MOVED,
            Tries(("chat.1", "chat.1"), moves=2),
            SECOND,
            MOVED,
        ),
        (NodeUnconnected("chat.1", "refused"), MOVED, None, None, MOVED),
        (UpstreamUnavailable("chat.1", "unloaded it"), MOVED, None, None, MOVED),
        (UpstreamDraining("chat.1", "stops"), MOVED, None, None, MOVED),
    ],
)
def test_error_to_retry(
    error: UpstreamFailed,
    first: Tries | None,
    again_there: Tries | None,
    at_the_limit: Tries | None,
    committed: Tries | None,
) -> None:
    assert next_try(error, Tries(), is_committed=False) == first
    assert next_try(error, MOVED, is_committed=False) == again_there
    assert next_try(error, AT_THE_LIMIT, is_committed=False) == at_the_limit
    assert next_try(error, Tries(), is_committed=True) == committed


def test_a_second_try_is_the_last() -> None:
    error = UpstreamConnectFailed("chat.2", "refused")
    assert next_try(error, SECOND, is_committed=False) is None
    silent = UpstreamSilent("chat.2", "is silent")
    moved = Tries(("chat.1", "chat.2"), moves=1, is_second=True)
    assert next_try(silent, SECOND, is_committed=False) == moved

"""Tokens open one session; sessions end by time, by command, and with their key."""

import hashlib
from pathlib import Path

import pytest

from proxy.auth.api_keys import ApiKeys, SignInLimit
from proxy.auth.keys_file import Key
from proxy.auth.sessions import IDLE_MAX_S, LIFE_MAX_S, TOKEN_LIFE_S, Sessions
from proxy.errors import SessionTokenRequired, TooManyRequests
from proxy.observe.record import discard

ADMIN = Key("root", hashlib.sha256(b"corral-admin").digest(), admin=True)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> Sessions:
    return Sessions(ApiKeys(None, discard), clock)


def new_session(sessions: Sessions) -> tuple[str, str]:
    new = sessions.redeem(sessions.new_token())
    assert new is not None
    return new


def test_a_token_opens_one_session(sessions: Sessions) -> None:
    token = sessions.new_token()
    new = sessions.redeem(token)
    assert new is not None
    assert sessions.redeem(token) is None
    found = sessions.use(*new)
    assert found is not None
    assert (found.client.name, found.client.admin) == ("(dashboard)", True)
    assert sessions.use(token, new[1]) is None
    with pytest.raises(SessionTokenRequired):
        sessions.use(new[0], "guess")
    sessions.end(new[0])
    assert sessions.use(*new) is None


def test_tabs_of_a_browser_share_a_session_and_have_a_token_each(
    sessions: Sessions, clock: Clock
) -> None:
    session_id, first = new_session(sessions)
    clock.now_s += IDLE_MAX_S / 2
    second = sessions.redeem(sessions.new_token(), session_id)
    third = sessions.open_for(ADMIN, session_id)
    assert second is not None
    assert {second[0], third[0]} == {session_id}
    assert len({first, second[1], third[1]}) == 3
    assert sessions.use(session_id, first)
    assert sessions.use(session_id, second[1])
    assert sessions.use(session_id, third[1]) is None  # no file has that key
    with pytest.raises(SessionTokenRequired):
        sessions.use(session_id, third[1])
    clock.now_s += IDLE_MAX_S - 1
    assert sessions.use(session_id, second[1])
    clock.now_s += 1
    with pytest.raises(SessionTokenRequired):
        sessions.use(session_id, first)
    sessions.end(session_id)
    assert sessions.use(session_id, second[1]) is None


def test_an_unknown_cookie_names_no_session(sessions: Sessions, clock: Clock) -> None:
    """Another program of the host may have set it."""
    new = sessions.redeem(sessions.new_token(), "chosen")
    assert new is not None
    assert new[0] != "chosen"
    clock.now_s += IDLE_MAX_S
    again = sessions.redeem(sessions.new_token(), new[0])
    assert again is not None
    assert again[0] != new[0]


def test_a_session_has_a_bounded_number_of_tabs(sessions: Sessions) -> None:
    session_id, first = new_session(sessions)
    for _ in range(16):
        assert sessions.redeem(sessions.new_token(), session_id)
    with pytest.raises(SessionTokenRequired):
        sessions.use(session_id, first)


def test_an_old_token_opens_none(sessions: Sessions, clock: Clock) -> None:
    token = sessions.new_token()
    clock.now_s += TOKEN_LIFE_S
    assert sessions.redeem(token) is None


def test_tokens_and_sessions_are_bounded(sessions: Sessions) -> None:
    tokens = [sessions.new_token() for _ in range(17)]
    assert sessions.redeem(tokens[0]) is None
    opened = [new_session(sessions) for _ in range(65)]
    assert sessions.use(*opened[0]) is None
    assert sessions.use(*opened[1])


def test_a_session_ends_when_it_is_idle_and_after_its_life(
    sessions: Sessions, clock: Clock
) -> None:
    idle, used = (new_session(sessions) for _ in range(2))
    clock.now_s = IDLE_MAX_S - 1
    assert sessions.use(*used)
    clock.now_s += 1
    assert sessions.use(*idle) is None
    while clock.now_s < LIFE_MAX_S - IDLE_MAX_S:
        assert sessions.use(*used)
        clock.now_s += IDLE_MAX_S - 1
    assert sessions.use(*used)
    clock.now_s = LIFE_MAX_S
    assert sessions.use(*used) is None


def test_a_session_of_a_key_ends_with_it(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text('[keys.root]\nkey = "corral-admin"\nadmin = true\n', "utf-8")
    keys = ApiKeys(path, discard, clock)
    sessions = Sessions(keys, clock)
    assert keys.with_text("corral-admin") == ADMIN
    new = sessions.open_for(ADMIN)
    assert (found := sessions.use(*new))
    assert found.client == ADMIN
    path.write_text('[keys.root]\nkey = "corral-admin"\n', "utf-8")
    clock.now_s += 2
    assert sessions.use(*new) is None


def test_wrong_tokens_are_limited_by_address(clock: Clock) -> None:
    limit = SignInLimit(clock)
    for _ in range(10):
        limit.check("10.0.0.1")
        limit.note_failure("10.0.0.1")
    with pytest.raises(TooManyRequests, match="retry in 6 s") as error:
        limit.check("10.0.0.1")
    assert error.value.retry_after_s == 6
    limit.check("10.0.0.2")
    clock.now_s += 6
    limit.check("10.0.0.1")

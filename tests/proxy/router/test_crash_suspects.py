"""Which requests are refused because engines crashed with them."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.requests import ask

from proxy.errors import CrashesEngine
from proxy.http.forms import Form, Part
from proxy.request.request import ProxyRequest
from proxy.router.engine_faults import CrashSuspects, fingerprint


def asked(**members: Any) -> ProxyRequest:
    return replace(ask("hello"), json={"model": "chat", "prompt": "a", **members})


def sound(content: bytes) -> ProxyRequest:
    form = Form((Part("file", content, "a.wav", "audio/wav"),))
    return replace(asked(), json={}, body=form.encode(), form=form)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def suspects(clock: Clock) -> CrashSuspects:
    return CrashSuspects(clock, 600)


def crash(suspects: CrashSuspects, proxy_request: ProxyRequest, times: int = 2) -> None:
    for _ in range(times):
        suspects.note_crash([proxy_request, proxy_request])


def test_it_is_refused_after_the_second_crash(suspects: CrashSuspects) -> None:
    crash(suspects, asked(), times=1)
    suspects.check(asked())
    crash(suspects, asked(), times=1)
    with pytest.raises(CrashesEngine, match=r"2 engines of chat .* refused for 600 s") as refused:
        suspects.check(asked())
    # Statuses that clients' libraries retry by themselves: 408, 409, 429 and 5xx.
    assert refused.value.status == 422


@pytest.mark.parametrize("same", [{"seed": 7}, {"stream": True}, {"user": "b"}, {"model": "x"}])
def test_what_changes_from_try_to_try_makes_no_difference(
    suspects: CrashSuspects, same: dict[str, Any]
) -> None:
    crash(suspects, asked())
    with pytest.raises(CrashesEngine):
        suspects.check(asked(**same))


def test_another_request_model_or_page_is_another(suspects: CrashSuspects) -> None:
    crash(suspects, asked())
    suspects.check(asked(prompt="b"))
    suspects.check(replace(asked(), model="other"))
    suspects.check(replace(asked(), path="/completion"))


def test_one_that_is_answered_is_cleared(suspects: CrashSuspects) -> None:
    crash(suspects, asked(), times=1)
    suspects.clear(asked())
    crash(suspects, asked(), times=1)
    suspects.check(asked())


def test_it_is_forgotten_after_a_while(suspects: CrashSuspects, clock: Clock) -> None:
    crash(suspects, asked())
    clock.now_s = 599.9
    with pytest.raises(CrashesEngine):
        suspects.check(asked())
    clock.now_s = 600
    suspects.check(asked())
    crash(suspects, asked(), times=1)
    suspects.check(asked())


def test_without_a_memory_none_is_refused(clock: Clock) -> None:
    suspects = CrashSuspects(clock, 0)
    crash(suspects, asked())
    suspects.check(asked())


def test_of_too_many_the_oldest_is_forgotten(suspects: CrashSuspects) -> None:
    crash(suspects, asked())
    for number in range(1024):
        crash(suspects, asked(prompt=number))
    suspects.check(asked())
    with pytest.raises(CrashesEngine):
        suspects.check(asked(prompt=0))


def test_forms_and_deeply_nested_bodies_are_identified_by_their_bytes() -> None:
    assert fingerprint(sound(b"a")) == fingerprint(sound(b"a"))
    assert fingerprint(sound(b"a")) != fingerprint(sound(b"b"))
    deep = orjson.loads(b"[" * 500 + b"]" * 500)
    assert fingerprint(replace(asked(x=deep), body=b"a")) != fingerprint(
        replace(asked(x=deep), body=b"b")
    )

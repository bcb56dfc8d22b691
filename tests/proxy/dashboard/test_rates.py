"""Rates count each token once, whether its request runs or has ended."""

from dataclasses import replace

from proxy.dashboard.state import Rates, Totals, slots_of, with_running
from proxy.router.lease import InstanceStats, LeaseStats
from proxy.upstream.upstream import Upstream

RUNNING = LeaseStats("a", "127.0.0.1", "decode", 20, 20, 8, 5, 1.0, 2.0, id_slot=1)


def instance(*leases: LeaseStats) -> InstanceStats:
    upstream = Upstream("chat.0", "chat", 2, None, "127.0.0.1", 1, "")
    return InstanceStats(
        upstream, in_service=True, conversations=0, prefill_tps=0, decode_tps=0, leases=leases
    )


def test_running_requests_count_until_they_end() -> None:
    totals = with_running(Totals(100, 50), [instance(RUNNING, replace(RUNNING, phase="ending"))])
    assert (totals.decoded_tokens, totals.prompt_tokens) == (105, 62)


def test_a_request_that_ends_is_not_counted_twice() -> None:
    rates = Rates()
    rates.add(Totals(0, 0), 0, 1)
    rates.add(Totals(10, 4), 2, 2)
    rates.add(Totals(0, 0), 0, 3)  # its lease is over, and it is not counted yet
    rates.add(Totals(12, 4, 1, 0.5), 0, 4)
    found = rates.history()
    assert found["tokens_per_second"] == [0, 10, 0, 2]
    assert found["queued"] == [0, 2, 0, 0]
    assert found["first_token_s"] == [None, None, None, 0.5]
    assert (found["at_s"], rates.latest()["first_token_s"]) == (4, 0.5)


def test_tokens_of_cancelled_requests_do_not_hide_those_that_follow() -> None:
    rates = Rates()
    for at_s, tokens in enumerate([0, 100, 0, 0, 0, 0, 5]):
        rates.add(Totals(tokens), 0, at_s)
    assert rates.latest()["tokens_per_second"] == 5


def test_history_is_bounded() -> None:
    rates = Rates()
    for at_s in range(1000):
        rates.add(Totals(at_s), 0, at_s)
    assert len(rates.history()["queued"]) == 900
    assert "first_token_s" not in rates.latest()


def test_slots_have_their_numbers() -> None:
    unknown = replace(RUNNING, request_id="b", id_slot=None, phase="prefill", decoded=0)
    found = slots_of([RUNNING, unknown], 3, 0.5)
    assert [found[name]["phase"] for name in ("0", "1", "2")] == ["prefill", "decode", "idle"]
    assert found["1"]["request"] == "a"
    assert found["1"]["began_at_s"] == 0.5
    assert list(slots_of([RUNNING], 0, 0)) == ["1"]

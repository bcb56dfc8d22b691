"""The slots of all instances, and what they do together."""

import pytest
from fakes.slots import NOW_S, instance, reading, writing

from proxy.metrics.slots_endpoint import all_slots, totals_of
from proxy.router.lease import LeaseStats


def test_each_slot_says_what_it_does() -> None:
    first, second, third = all_slots([instance(reading(), writing())], NOW_S)
    assert (first.state, first.prompt_tokens, first.prompt_tokens_done) == ("prefill", 50, 30)
    assert (first.cached_tokens, first.age_s, first.tokens_per_second) == (10, 3.0, 0.0)
    assert (second.state, second.decoded_tokens, second.tokens_per_second) == ("decode", 21, 10.0)
    assert (third.state, third.age_s, third.prompt_tokens) == ("idle", 0.0, None)


def test_numbers_are_unique_over_all_instances() -> None:
    slots = all_slots([instance(slots=2), instance(name="code.1", slots=1)], NOW_S)
    assert [(slot.id, slot.instance, slot.index) for slot in slots] == [
        (0, "chat.1", 0),
        (1, "chat.1", 1),
        (2, "code.1", 0),
    ]


def test_a_slot_whose_request_is_over_is_still_in_use() -> None:
    ending = writing(phase="ending")
    cut = reading(phase="ending")
    slots = all_slots([instance(ending, cut)], NOW_S)
    assert [(slot.state, slot.is_ending) for slot in slots] == [
        ("decode", True),
        ("prefill", True),
        ("idle", False),
    ]
    assert totals_of(slots).active == 2


def test_of_an_instance_that_leaves_only_what_it_holds_is_there() -> None:
    slots = all_slots([instance(writing(), is_admitted=False)], NOW_S)
    assert [slot.state for slot in slots] == ["decode"]


def test_the_first_token_is_no_rate() -> None:
    (slot, *_) = all_slots([instance(writing(1, first_token_at_s=NOW_S))], NOW_S)
    assert slot.tokens_per_second == 0.0


@pytest.mark.parametrize(
    ("leases", "batch", "utilisation"),
    [
        ([], None, 0.0),
        ([reading()], "prefill", 0.25),
        ([writing(), writing()], "decode", 0.5),
        ([reading(), writing(), writing(), reading()], "mixed", 1.0),
    ],
)
def test_together_they_are_a_batch(
    leases: list[LeaseStats], batch: str | None, utilisation: float
) -> None:
    load = totals_of(all_slots([instance(*leases, slots=4)], NOW_S))
    assert (load.batch, load.utilisation) == (batch, utilisation)
    assert load.slots == load.idle + load.active == 4
    assert load.active == load.prefill + load.decode
    assert load.generating == load.decode
    assert load.tokens_per_second == 10.0 * load.decode


def test_no_slots_at_all_are_not_in_use() -> None:
    assert totals_of([]).utilisation == 0.0

"""Of several reasons, the costliest comes first."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.errors import ProxyError
from proxy.observe.cache_finding import Cause
from proxy.observe.explanation import change_text, changes_by_client, error_meaning, explain

CACHE = {"tokens": 600, "found": 100, "reusable": 500}
PHASES = {"queued_ms": 0.0, "load_ms": 0.0, "prefill_ms": 500.0, "decode_ms": 300.0}


def causes(cache: dict[str, Any] | None, **phases: float) -> list[Cause]:
    fields = {"request": "a", "model": "chat", "duration_ms": 1000.0, "cache": cache, **PHASES}
    return [finding.cause for finding in explain({**fields, **phases}).findings]


def test_a_miss_costs_its_share_of_the_prefill() -> None:
    evicted = {**CACHE, "cause": "slot_evicted"}
    assert causes(evicted) == [Cause.SLOT_EVICTED]
    found = explain({"request": "a", "cache": evicted, **PHASES})
    assert found.findings[0].cost_ms == 400.0
    assert causes(evicted, queued_ms=300.0) == [Cause.SLOT_EVICTED, Cause.QUEUE]
    assert causes(evicted, queued_ms=500.0) == [Cause.QUEUE, Cause.SLOT_EVICTED]


def test_a_load_is_part_of_the_cost_of_an_unloaded_model() -> None:
    unloaded = {**CACHE, "cause": "model_unloaded"}
    assert causes(unloaded, load_ms=2000.0) == [Cause.MODEL_UNLOADED]
    first = {"cause": "first_request", "tokens": 600, "found": 0, "reusable": 0}
    assert causes(first, load_ms=2000.0) == [Cause.LOADING, Cause.FIRST_REQUEST]


def test_a_wait_for_the_instance_with_the_cache_is_part_of_the_cost() -> None:
    other = {**CACHE, "cause": "other_instance"}
    assert causes(other, queued_ms=2000.0) == [Cause.QUEUE, Cause.OTHER_INSTANCE]
    assert causes({**other, "is_awaited": True}, queued_ms=2000.0) == [Cause.OTHER_INSTANCE]


def test_short_waits_are_not_told_and_a_plain_cache_comes_last() -> None:
    found = {**CACHE, "cause": "all_found"}
    assert causes(found, queued_ms=40.0, stalled_ms=90.0) == [Cause.ALL_FOUND]
    assert causes(found, stalled_ms=400.0) == [Cause.SLOW_CLIENT, Cause.ALL_FOUND]


def test_what_another_version_wrote_is_left_out() -> None:
    assert causes({**CACHE, "cause": "weather"}) == []
    assert causes(None) == []
    assert explain({}).as_json()["cause"] is None


def test_a_short_prompt_is_told_as_one() -> None:
    (found,) = explain({"request": "a", "prompt_tokens": 20, "cached_tokens": 10}).findings
    assert found.cause is Cause.SHORT_PROMPT
    assert "30 tokens" in found.sentence
    assert explain({"request": "a", "prompt_tokens": 100}).findings == ()


def test_the_phases_and_the_sentence_are_in_the_json() -> None:
    fields = {"request": "a", "model": "chat", "duration_ms": 5000.0, "queued_ms": 4200.0}
    told = explain(fields).as_json()
    assert told["phases_ms"] == {"queued": 4200.0}
    assert told["cause"] == "queue"
    assert told["sentence"] == "4.2 s waited for a slot of chat: all were in use"
    assert "parallel" in told["advice"]


def test_what_came_from_disk_is_told_and_its_restore_is_no_computing() -> None:
    cache = {"cause": "all_found", "tokens": 600, "found": 500, "reusable": 500}
    (plain,) = explain({"cache": cache}).findings
    assert plain.sentence.startswith("500 of 600 prompt tokens were in the cache")
    (found,) = explain({"cache": {**cache, "tier": "disk", "restore_ms": 80.0}}).findings
    assert "500 of 600 prompt tokens were on disk, restored in 0.08 s" in found.sentence
    (found,) = explain({"cache": {**cache, "tier": "disk"}}).findings
    assert "restored when the engine started" in found.sentence
    lost = {**CACHE, "cause": "slot_evicted", "tier": "disk", "restore_ms": 100.0}
    assert explain({"cache": lost, **PHASES}).findings[0].cost_ms == 320.0


def test_a_wait_for_another_request_is_shown_with_the_tokens_saved() -> None:
    cache = {"cause": "first_request", "tokens": 2654, "found": 2608, "reusable": 2608}
    waited = {**cache, "tier": "disk", "restore_ms": 9.0, "beginning_wait_ms": 6700.0}
    (found,) = explain({"cache": waited, "queued_ms": 6700.0, "duration_ms": 7500.0}).findings
    assert "2608 of 2654 prompt tokens were on disk" in found.sentence
    assert "waited 6.7 s for a request that computed the same beginning" in found.sentence


def test_a_wait_for_held_slots_is_told_instead_of_a_wait_in_the_queue() -> None:
    cache = {"cause": "first_request", "tokens": 2654, "found": 0, "reusable": 0}
    waited = {**cache, "hold_wait_ms": 1500.0}
    (found,) = explain({"cache": waited, "queued_ms": 1500.0, "duration_ms": 7500.0}).findings
    assert "it waited 1.5 s for slots that were held for agents' next turns" in found.sentence


def test_a_load_names_the_group_by_whose_rule_others_went() -> None:
    rule = "by the rule of groups.large, other models had to be unloaded for it"
    fields = {"model": "chat", "load_group": "large", "evict_ms": 900.0, "duration_ms": 1000.0}
    (found,) = explain(fields).findings
    assert found.sentence == f"0.9 s waited for chat to load; {rule}"
    cache = {"cause": "model_unloaded", "tokens": 2654, "found": 0, "reusable": 2600}
    (found,) = explain({**fields, "cache": cache}).findings
    assert found.sentence.endswith(rule)


def test_a_load_tells_that_its_model_had_given_way() -> None:
    fields = {"model": "chat", "gave_way_ms": 34_210.0, "load_ms": 900.0, "duration_ms": 60_000.0}
    (found,) = explain(fields).findings
    left = "its memory had been left to another program for 34 s"
    assert found.sentence == f"0.9 s waited for chat to load; {left}"


def codes(error: type[ProxyError] = ProxyError) -> set[str]:
    return {error.code}.union(*map(codes, error.__subclasses__()))


@pytest.mark.parametrize("code", sorted(codes() - {ProxyError.code}))
def test_each_error_has_a_different_meaning(code: str) -> None:
    names = {"model": "chat", "instance": "chat.0"}
    meaning, _ = error_meaning(503, code, **names)
    assert meaning != error_meaning(503, "some_code_of_an_engine", **names)[0]


def test_an_error_is_explained_by_its_code_before_the_times() -> None:
    failed = {"model": "chat", "status": 503, "code": "model_failed", "queued_ms": 900.0}
    (found,) = explain({**failed, "duration_ms": 1000.0}).findings
    assert found.cause is Cause.ERROR
    assert found.sentence.startswith("503 model_failed: chat cannot be loaded")
    assert found.advice
    assert "corral status" in found.advice
    told = explain(failed).as_json()
    assert (told["status"], told["code"], told["cause"]) == (503, "model_failed", "error")


def test_an_error_for_the_want_of_slots_tells_the_wait_too() -> None:
    fields = {"model": "chat", "status": 503, "code": "queue_timeout", "queued_ms": 900.0}
    assert [finding.cause for finding in explain(fields).findings] == [Cause.ERROR, Cause.QUEUE]


def test_a_failed_request_has_its_error_first_and_then_its_cache_loss() -> None:
    fields = {"model": "chat", "instance": "chat.0", "status": 502, "code": "upstream_failed"}
    found = explain({**fields, "cache": {**CACHE, "cause": "slot_evicted"}, **PHASES}).findings
    assert [entry.cause for entry in found] == [Cause.ERROR, Cause.SLOT_EVICTED]
    assert found[0].sentence == "502 upstream_failed: chat.0 failed while it answered"


def test_an_engines_own_error_and_a_client_that_left_are_told() -> None:
    fields = {"model": "chat", "instance": "chat.0", "status": 400, "code": "template_error"}
    (refused,) = explain(fields).findings
    assert refused.sentence == "400 template_error: chat.0 refused the request"
    (left,) = explain({"status": 499}).findings
    assert left.sentence == "499: the client disconnected before the end"
    assert left.advice is None


def changed(kind: str, start: int, *, lost: int, is_continued: bool = False) -> dict[str, Any]:
    cache = {
        "cause": "system_prompt_changed",
        "tokens": 900,
        "found": 900 - lost,
        "reusable": 900,
        "message": 0,
        "role": "system",
        "is_continued": is_continued,
        "changes": [[kind, start, start + 10], ["path", 400, 420]],
    }
    return {"cache": cache, "ended_at": "2026-11-24T10:00:00.000+00:00"}


def test_changes_of_a_client_are_gathered_with_the_rules_that_undo_them() -> None:
    found = changes_by_client(
        [
            changed("date", 120, lost=600),
            changed("date", 123, lost=500),
            changed("time", 200, lost=100, is_continued=True),
            {"cache": {"cause": "all_found", "tokens": 900, "found": 900, "reusable": 900}},
            {"cache": None},
        ]
    )
    dates, times, paths = found
    assert (dates["start"], dates["end"], dates["tokens"]) == (120, 133, 1100)
    assert (dates["conversations"], dates["turns"], dates["days"]) == (2, 0, 1)
    assert [row["rules"] for row in found] == [
        ["move:date"],
        ["freeze:time"],
        ["freeze:path", "move:path"],
    ]
    assert (times["tokens"], paths["tokens"]) == (100, 0)
    assert change_text(dates) == "message 0, characters 120 to 133: a date"


def test_a_finding_names_the_change() -> None:
    fields = changed("date", 120, lost=600)
    fields["cache"]["token"] = 30
    (found,) = explain(fields).findings
    assert "(a date, characters 120 to 130; a path, characters 400 to 420)" in found.sentence


def test_the_rules_that_changed_a_prompt_are_told() -> None:
    assert explain({"rules": "move:date sort-tools"}).rules == ("move:date", "sort-tools")
    assert explain({}).rules == ()

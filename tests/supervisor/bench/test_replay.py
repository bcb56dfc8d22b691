"""Which requests a replay sends, how large they are, and when."""

from collections.abc import Sequence
from typing import Any

from supervisor.bench.workload import ReplayedRequest, plan_replay
from supervisor.records.requests import RecordedRequest

WIDE = {"context": 4096, "prompts": 100_000, "answers": 100_000}


def request(**changed: Any) -> dict[str, Any]:
    """A recorded request; `after_any_s` is from the beginning of the one before, None for a run."""
    return {
        "conversation": 1,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "generated_tokens": 10,
        "after_any_s": 5.0,
        "duration_s": 1.0,
    } | changed


def plan(requests: Sequence[dict[str, Any]], **limits: int) -> list[ReplayedRequest]:
    recorded: list[RecordedRequest] = []
    run, began_at = 0, 1e9
    for given in requests:
        fields = dict(given)
        pause_s, duration_s = fields.pop("after_any_s"), fields.pop("duration_s")
        run, began_at = (run + 1, 1e9) if pause_s is None else (run, began_at + pause_s)
        times = {"began_at": began_at, "ended_at": began_at + duration_s}
        recorded.append(RecordedRequest(run=run, **times, **fields))
    return plan_replay(recorded, **limits)


def sizes(replayed: Sequence[ReplayedRequest]) -> list[tuple[int, int, int, int]]:
    return [
        (request.conversation, request.prompt, request.shared, request.answer)
        for request in replayed
    ]


def test_a_conversation_goes_on_from_its_answer() -> None:
    replayed = plan([request(), request(prompt_tokens=130), request(prompt_tokens=200)], **WIDE)
    assert sizes(replayed) == [(0, 100, 0, 10), (0, 130, 110, 10), (0, 200, 140, 10)]


def test_a_common_beginning_is_shared_by_first_requests() -> None:
    replayed = plan([request(), request(conversation=2, cached_tokens=60)], **WIDE)
    assert sizes(replayed) == [(1, 100, 0, 10), (0, 100, 60, 10)]


def test_a_truncated_history_shares_the_cached_tokens() -> None:
    replayed = plan([request(prompt_tokens=500), request(cached_tokens=40)], **WIDE)
    assert [request.shared for request in replayed] == [0, 40]


def test_a_request_waits_for_those_that_had_ended_and_no_other() -> None:
    recorded = [
        request(conversation=1, duration_s=4.0),
        request(conversation=2, after_any_s=1.0, duration_s=1.0),
        request(conversation=2, after_any_s=2.0, duration_s=0.5),  # while the first one runs
        request(conversation=1, after_any_s=60.0),
    ]
    replayed = plan(recorded, **WIDE)
    assert [request.after for request in replayed] == [(), (), (1,), (0, 1, 2)]
    assert [request.pause_s for request in replayed] == [0.0, 0.0, 0.25, 0.25]


def test_a_short_pause_stays_as_it_was() -> None:
    replayed = plan([request(), request(after_any_s=1.1)], **WIDE)
    assert [round(request.pause_s, 6) for request in replayed] == [0.0, 0.1]


def test_lines_in_the_order_of_ends_are_replayed_in_the_order_of_beginnings() -> None:
    ended_first = request(conversation=2, after_any_s=None, duration_s=0.5)
    began_first = request(conversation=1, after_any_s=-1.0, duration_s=5.0)
    replayed = plan([ended_first, began_first], **WIDE)
    assert [request.conversation for request in replayed] == [0, 1]
    assert replayed[1].after == ()


def test_requests_before_a_restart_end_before_those_after_it() -> None:
    replayed = plan([request(duration_s=9.0), request(after_any_s=None)], **WIDE)
    assert replayed[1].after == (0,)


def test_sizes_fit_into_the_context() -> None:
    limits = {"context": 256, "prompts": 100_000, "answers": 100_000}
    replayed = plan([request(prompt_tokens=9000, generated_tokens=9000)], **limits)
    assert sizes(replayed) == [(0, 128, 0, 128)]


def test_the_latest_conversations_are_taken_whole_until_the_limits() -> None:
    recorded = [
        request(conversation=number, prompt_tokens=100 * turn, after_any_s=2.0)
        for number in (1, 2, 3)
        for turn in (1, 2)
    ]
    replayed = plan(recorded, context=4096, prompts=400, answers=1000)
    assert [request.prompt for request in replayed] == [100, 200] * 2
    assert len({request.conversation for request in replayed}) == 2
    few_answers = {"context": 4096, "prompts": 400, "answers": 30}
    assert [entry.prompt for entry in plan(recorded, **few_answers)] == [100, 100, 200]


def test_one_request_is_taken_at_any_size() -> None:
    limits = {"context": 4096, "prompts": 1, "answers": 1}
    assert len(plan([request(), request()], **limits)) == 1
    assert plan([], **limits) == []


def test_requests_of_unknown_conversations_are_separate_conversations() -> None:
    replayed = plan([request(conversation=None) for _ in range(100)], **WIDE)
    assert [request.conversation for request in replayed] == list(reversed(range(64)))

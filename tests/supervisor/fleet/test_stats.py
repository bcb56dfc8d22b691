from supervisor.fleet.stats import EngineStats, combine


def metrics(tokens: float, seconds: float) -> dict[str, float]:
    return {"tokens_predicted_total": tokens, "tokens_predicted_seconds_total": seconds}


def test_speed_is_that_of_the_tokens_since_the_last_look() -> None:
    first = combine(EngineStats(pid=1), metrics(100, 2), None)
    assert first.tokens_per_second == 50
    second = combine(first, metrics(160, 3), None)
    assert second.tokens_per_second == 60


def test_an_idle_instance_keeps_its_last_speed() -> None:
    busy = combine(EngineStats(pid=1), metrics(100, 2), None)
    assert combine(busy, metrics(100, 2), None).tokens_per_second == 50
    assert combine(busy, {}, None).tokens_per_second == 50


def test_an_instance_that_never_decoded_has_no_speed() -> None:
    assert combine(EngineStats(pid=1), metrics(0, 0), 4096) == EngineStats(pid=1, memory_bytes=4096)


def test_a_single_token_that_took_no_time_is_no_speed() -> None:
    assert combine(EngineStats(pid=1), metrics(1, 0.000001), None).tokens_per_second is None


def test_acceptance_is_the_accepted_share_of_drafted_tokens() -> None:
    counters = {
        "spec_decode_num_draft_tokens_total": 200.0,
        "spec_decode_num_accepted_tokens_total": 76.0,
    }
    found = combine(EngineStats(pid=1), counters, None)
    assert (found.drafted_tokens, found.accepted_tokens, found.acceptance) == (200, 76, 0.38)
    assert combine(found, {}, None).acceptance == 0.38
    assert EngineStats(pid=1).acceptance is None

"""The engines' own metrics: which are exported, their labels, how rarely they are read."""

import asyncio
from pathlib import Path

import pytest
from support import engine as engines
from support.corral_cli import PATIENCE_S
from support.proxy_harness import ProxyHarness, model_info
from support.upstream import Call, Fake

from proxy.endpoints.prometheus import Metrics
from proxy.observe.metrics import (
    Passes,
    Scrape,
    Scraped,
    averages,
    merge_families,
    passes_of,
    relabelled_metrics,
)
from proxy.observe.record import discard
from proxy.upstream.client import fetch, get_request
from proxy.upstream.engine_state import plain_values
from proxy.upstream.upstream import Upstream
from supervisor.builds.discover import Engine

PAGE = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 240
# HELP llamacpp:n_tokens_max Largest observed sequence length.
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max 97
# HELP llamacpp:predicted_tokens_seconds Average generation throughput in tokens/s
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds 51.0585
# HELP llamacpp:requests_deferred Number of requests deferred
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 3
# HELP llamacpp:accepted_per_pos_total Accepted tokens.
# TYPE llamacpp:accepted_per_pos_total counter
llamacpp:accepted_per_pos_total{position="0"} 5
"""
COUNTED = """\
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total 40
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 240
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 260
"""


def upstream(name: str = "chat.1", port: int = 0) -> Upstream:
    return Upstream(name, "chat", 1, None, "127.0.0.1", port, "")


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


async def send_metrics(call: Call) -> None:
    await call.head("Content-Type: text/plain", f"Content-Length: {len(PAGE)}")
    await call.send(PAGE.encode())


def test_totals_current_values_and_averages_are_exported() -> None:
    families = list(relabelled_metrics(PAGE, upstream()))
    samples = [sample for family in families for sample in family.samples]
    assert {(sample.name, family.type) for family in families for sample in family.samples} == {
        ("llamacpp:prompt_tokens_total", "counter"),
        ("llamacpp:n_tokens_max", "gauge"),
        ("llamacpp:predicted_tokens_seconds", "gauge"),
        ("llamacpp:requests_deferred", "gauge"),
        ("llamacpp:accepted_per_pos_total", "counter"),
    }
    assert all(sample.labels["model_instance"] == "chat.1" for sample in samples)
    assert samples[-1].labels == {"position": "0", "model": "chat", "model_instance": "chat.1"}


@pytest.mark.parametrize("text", ["", '{"error":{"code":501}}', "llamacpp:x 1 2 3 4\n", "\x00"])
def test_text_that_is_not_metrics_has_none(text: str) -> None:
    assert list(relabelled_metrics(text, upstream())) == []


def test_families_of_several_engines_are_merged() -> None:
    pages = [relabelled_metrics(PAGE, upstream(name)) for name in ("chat.1", "chat.2")]
    families = merge_families(family for page in pages for family in page)
    assert len({family.name for family in families}) == len(families) == 5
    assert [sample.labels["model_instance"] for sample in families[0].samples] == [
        "chat.1",
        "chat.2",
    ]


async def test_an_engine_is_read_once_in_two_seconds(proxy: ProxyHarness) -> None:
    fake, clock = await proxy.fake(send_metrics), Clock()
    scrape = Scrape(proxy.settings, clock)
    for later_s, asked in ((0.0, 1), (1.9, 1), (2.0, 2)):
        clock.now_s = 50.0 + later_s
        (reading,) = await scrape.read([fake.upstream()])
        assert len(reading.families) == 5
        assert fake.calls.qsize() == asked
    call = await fake.calls.get()
    assert call.line == "GET /metrics HTTP/1.1"
    assert call.headers["Authorization"] == "Bearer inner"


async def test_concurrent_reads_are_one_request(proxy: ProxyHarness) -> None:
    fake = await proxy.fake(send_metrics)
    scrape = Scrape(proxy.settings, Clock())
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(scrape.read([fake.upstream()]))
    assert fake.calls.qsize() == 1


async def test_a_restarted_instance_is_read_again(proxy: ProxyHarness) -> None:
    fake = await proxy.fake(send_metrics)
    scrape = Scrape(proxy.settings, Clock())
    await scrape.read([fake.upstream()])
    (reading,) = await scrape.read([fake.upstream(slots=1)])
    assert reading.upstream.slots == 1
    assert fake.calls.qsize() == 2


async def test_a_withdrawn_instance_is_dropped(proxy: ProxyHarness) -> None:
    fake = await proxy.fake(send_metrics)
    scrape = Scrape(proxy.settings, Clock())
    await scrape.read([fake.upstream()])
    assert await scrape.read([]) == []
    await scrape.read([fake.upstream()])
    assert fake.calls.qsize() == 2


async def test_an_instance_can_be_withdrawn_while_it_is_read(proxy: ProxyHarness) -> None:
    may_answer = asyncio.Event()

    async def answer_late(call: Call) -> None:
        await may_answer.wait()
        await send_metrics(call)

    fake = await proxy.fake(answer_late)
    scrape = Scrape(proxy.settings, Clock())
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(scrape.read([fake.upstream()]))
        await fake.calls.get()
        await scrape.read([])
        may_answer.set()
    assert reading.result() == []


async def test_an_engine_that_does_not_answer_does_not_affect_the_others(
    proxy: ProxyHarness,
) -> None:
    async def refuse(call: Call) -> None:
        await call.head(f"Content-Length: {len(PAGE)}", status="501 Not Implemented")
        await call.send(PAGE.encode())

    async def hang(call: Call) -> None:
        await call.until_left()

    fakes: list[Fake] = [
        await proxy.fake(script, f"chat.{number}")
        for number, script in enumerate((refuse, send_metrics, hang))
    ]
    gone = upstream("chat.3", port=9)
    scrape = Scrape(proxy.settings, timeout_s=0.05)
    readings = await scrape.read([*(fake.upstream() for fake in fakes), gone])
    assert [bool(reading.families) for reading in readings] == [False, True, False, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (COUNTED, Passes(count=40, prompt_tokens=240, decode_tokens=260)),
        (COUNTED.replace("n_decode_total 40", "n_decode_total 0"), None),
        (PAGE, None),
        ("", None),
    ],
    ids=["counted", "none yet", "not counted", "unread"],
)
def test_the_tokens_of_each_pass(text: str, expected: Passes | None) -> None:
    """seed 001: MicroBatch.len, n_prompt_tokens, n_decode_tokens, on average."""
    families = tuple(relabelled_metrics(text, upstream()))
    assert passes_of(Scraped(upstream(), 50.0, families=families)) == expected


TOTALS = """\
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total {tokens}
# TYPE llamacpp:tokens_predicted_seconds_total counter
llamacpp:tokens_predicted_seconds_total {seconds}
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds 0
"""


@pytest.mark.parametrize(
    ("tokens", "seconds", "expected"), [(120, 3.0, 20.0), (100, 2.0, 0.0), (130, 2.5, 60.0)]
)
def test_an_average_is_that_since_our_last_read(
    tokens: int, seconds: float, expected: float
) -> None:
    """Another reader in between resets the engine's own averages."""
    before = {"tokens_predicted_total": 100.0, "tokens_predicted_seconds_total": 2.0}
    text = TOTALS.format(tokens=tokens, seconds=seconds)
    assert averages(before, plain_values(text)) == {"predicted_tokens_seconds": expected}


async def test_another_reader_of_an_engine_changes_no_average(
    proxy: ProxyHarness, engine: Engine, tiny_model: Path
) -> None:
    with engines.running(engine, tiny_model, "-c", "2048", "-np", "1", "--metrics") as socket:
        own, clock = engines.upstream(socket, 1), Clock()
        proxy.router.admit(own)
        scrape, names = Scrape(proxy.settings, clock), ("predicted", "prompt")
        for _ in range(2):
            body = {"model": "chat", "prompt": "the cat", "n_predict": 64, "cache_prompt": False}
            async with proxy.http.post("/completion", json=body) as response:
                assert response.status == 200
            await fetch(own, get_request("/metrics"), proxy.settings, PATIENCE_S, 1_000_000)
            clock.now_s += 10.0
            await scrape.read([own])  # for `corral status`
            for _ in range(2):  # of one reading
                (reading,) = await scrape.expose([own])
                values = {family.name: family.samples[0].value for family in reading.families}
                assert all(values[f"llamacpp:{name}_tokens_seconds"] > 0 for name in names)


async def test_a_reader_that_did_not_wait_leaves_the_engine_to_the_next(
    proxy: ProxyHarness,
) -> None:
    async def hang(call: Call) -> None:
        await call.until_left()

    fake = await proxy.fake(hang)
    scrape = Scrape(proxy.settings, Clock())
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(scrape.read([fake.upstream()]))
        await fake.calls.get()
        reading.cancel()
    fake.script = send_metrics
    (found,) = await scrape.read([fake.upstream()])
    assert found.families


async def test_status_uses_the_figures_of_metrics_and_waits_for_no_busy_engine(
    proxy: ProxyHarness,
) -> None:
    fake = await proxy.fake(send_metrics)
    clock = Clock()
    metrics = Metrics(proxy.settings, discard, clock)
    in_flight = proxy.core.server_state.in_flight
    await metrics.render("", [model_info("chat")], proxy.router, in_flight)
    found = await metrics.engine_values(proxy.router, PATIENCE_S)
    assert fake.calls.qsize() == 1
    clock.now_s += 10.0  # it is due, but this caller has no time to wait
    assert await metrics.engine_values(proxy.router, 0.0) == found
    assert found["chat.1"]["prompt_tokens_total"] == 240


async def test_metrics_use_no_figures_that_were_read_for_others(proxy: ProxyHarness) -> None:
    fake, clock = await proxy.fake(send_metrics), Clock()
    scrape = Scrape(proxy.settings, clock)
    await scrape.read([fake.upstream()])
    for _ in range(2):
        await scrape.expose([fake.upstream()])
    await scrape.read([fake.upstream()])
    assert fake.calls.qsize() == 2

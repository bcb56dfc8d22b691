"""`/metrics`, and the equations that its counters satisfy."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse
from support.proxy_harness import ProxyHarness, model_info, until
from support.upstream import Call

from proxy.observe.metrics import BY_INSTANCE, COUNTERS, HISTOGRAMS, families

# Values by name and label values, in the order of the labels' names.
Samples = dict[tuple[str, ...], float]
LABELS = ("chat", "chat.1")

ANSWER = b"""\
{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],\
"timings":{"cache_n":28,"prompt_n":12,"prompt_ms":60.0,"predicted_n":11,"predicted_ms":500.0}}"""
METRICS = b"# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 240\n"


async def answer(call: Call) -> None:
    body = METRICS if call.line.startswith("GET /metrics") else ANSWER
    await call.head("Content-Type: application/json", f"Content-Length: {len(body)}")
    await call.send(body)


async def read(proxy: ProxyHarness) -> list[Metric]:
    async with proxy.http.get("/metrics") as response:
        assert response.status == 200
        return list(parse(await response.text()))


async def samples(proxy: ProxyHarness) -> Samples:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in await read(proxy)
        for sample in family.samples
    }


def total(values: Samples, name: str) -> float:
    return sum(value for key, value in values.items() if key[0] in {name, f"{name}_total"})


async def test_a_request_counts_in_every_metric(proxy: ProxyHarness) -> None:
    await proxy.fake(answer)
    await proxy.send()
    values = await samples(proxy)
    assert values["corral_requests_accepted_total", "chat"] == 1
    assert values["corral_requests_finished_total", *LABELS] == 1
    assert values["corral_prompt_tokens_total", *LABELS] == 12
    assert values["corral_cached_tokens_total", *LABELS] == 28
    assert values["corral_decoded_tokens_total", *LABELS] == 11
    assert values["corral_prompts_by_tier_total", "chat", "slot"] == 1
    assert values["corral_time_per_output_token_seconds_sum", *LABELS] == pytest.approx(0.05)
    assert values["corral_time_per_output_token_seconds_bucket", "0.05", *LABELS] == 1
    assert values["corral_request_seconds_count", *LABELS] == 1
    assert values["corral_queue_seconds_count", *LABELS] == 1
    assert values["corral_slots", *LABELS] == 2
    assert values["corral_slots_decode", *LABELS] == 0
    assert values["corral_kv_cache_usage_ratio", "chat"] == 0
    assert values["corral_requests_waiting", "chat", "interactive"] == 0
    assert values["process_resident_memory_bytes",] > 0


async def test_a_queued_request_is_neither_accepted_nor_rejected(proxy: ProxyHarness) -> None:
    async def hold(call: Call) -> None:
        if call.line.startswith("POST"):
            await call.until_left()
        await answer(call)

    fake = await proxy.fake(hold, is_admitted=False)
    proxy.router.admit(fake.upstream(slots=1))
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(proxy.send()) for _ in range(2)]
        await fake.calls.get()
        await until(lambda: proxy.router.queues.stats()["chat"].interactive == 1)
        values = await samples(proxy)
        for task in asking:
            task.cancel()
    names = ("accepted", "in_flight", "waiting", "rejected", "cancelled")
    assert [total(values, f"corral_requests_{name}") for name in names] == [1, 1, 1, 0, 0]
    assert values["corral_kv_cache_usage_ratio", "chat"] == 1


async def test_the_engines_own_metrics_have_model_and_instance_labels(proxy: ProxyHarness) -> None:
    for name in ("chat.1", "chat.2"):
        await proxy.fake(answer, name)
    values = await samples(proxy)
    assert values["llamacpp:prompt_tokens_total", *LABELS] == 240
    assert values["llamacpp:prompt_tokens_total", "chat", "chat.2"] == 240
    assert values["corral_engine_scrape_success", *LABELS] == 1


async def test_only_visible_models_are_included(proxy: ProxyHarness) -> None:
    await proxy.fake(answer)
    await proxy.send()
    proxy.loader.model_infos = [model_info("other")]
    values = await samples(proxy)
    assert not any("chat" in key for key in values)
    assert ("process_resident_memory_bytes",) in values


@pytest.mark.parametrize("accept", ["", "text/plain", "nonsense", "*/*", ",;=,"])
async def test_plain_text_is_the_default(proxy: ProxyHarness, accept: str) -> None:
    async with proxy.http.get("/metrics", headers={"Accept": accept}) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        assert list(parse(await response.text()))


# Accept headers of servers. Source: scrape/scrape.go of Prometheus 2.42 and 3.5.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3_TEXT = (
    "text/plain;version=0.0.4;q=0.4,application/openmetrics-text;version=1.0.0;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize("accept", ["application/openmetrics-text", PROMETHEUS_2, PROMETHEUS_3])
async def test_names_are_the_same_in_both_formats(proxy: ProxyHarness, accept: str) -> None:
    await proxy.fake(answer)
    await proxy.send()
    plain = await read(proxy)
    async with proxy.http.get("/metrics", headers={"Accept": accept}) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        text = await response.text()
    families = list(parse_openmetrics(text))  # type: ignore[no-untyped-call]  # theirs
    assert [(family.name, family.type, family.documentation) for family in families] == [
        (entry.name, entry.type, entry.documentation) for entry in plain
    ]
    assert "llamacpp:prompt_tokens" in {family.name for family in families}
    assert [{sample.name for sample in family.samples} for family in families] == [
        {sample.name for sample in family.samples} for family in plain
    ]


async def test_the_format_that_is_named_first_is_sent(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/metrics", headers={"Accept": PROMETHEUS_3_TEXT}) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_no_label_has_a_name_that_prometheus_gives(proxy: ProxyHarness) -> None:
    await proxy.fake(answer)
    await proxy.send()
    labels = {
        name
        for response in await read(proxy)
        for sample in response.samples
        for name in sample.labels
    }
    assert "model_instance" in labels
    assert not labels & {"instance", "job"}


async def test_an_instance_counts_from_zero(proxy: ProxyHarness) -> None:
    await proxy.fake(answer)
    values = await samples(proxy)
    counters = [name for name in COUNTERS if families()[name][0] == BY_INSTANCE]
    assert all(values[f"corral_{name}_total", *LABELS] == 0 for name in counters)
    assert all(values[f"corral_{name}_count", *LABELS] == 0 for name in HISTOGRAMS)


async def test_each_family_appears_once(proxy: ProxyHarness) -> None:
    for name in ("chat.1", "chat.2"):
        await proxy.fake(answer, name)
    await proxy.send()
    names = [family.name for family in await read(proxy)]
    assert len(names) == len(set(names))


class Mix:
    """Clients and instances that answer, reject, break, disconnect or wait, by a seed."""

    def __init__(self, proxy: ProxyHarness, seed: int) -> None:
        self._proxy = proxy
        self._random = random.Random(seed)  # noqa: S311 (a schedule, not a secret)
        self._may_end = asyncio.Event()
        self.sent = 0
        self.seen = Counter[int]()

    async def play(self, call: Call) -> None:
        if call.line.startswith("GET "):
            await answer(call)
            return
        match self._random.choice(("answer", "refuse", "drop", "hold")):
            case "answer":
                await answer(call)
            case "refuse":
                body = b'{"error":{"code":400,"message":"no","type":"invalid_request_error"}}'
                fields = ("Content-Type: application/json", f"Content-Length: {len(body)}")
                await call.head(*fields, status="400 Bad Request")
                await call.send(body)
            case "drop":
                call.drop()
            case "hold":
                await self._may_end.wait()
                await answer(call)

    async def run(self, requests: int, look: Callable[[], Awaitable[None]]) -> None:
        """Send requests; call `look` repeatedly while they are in flight, and at the end."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._send()) for _ in range(requests)]
            while len(tasks) - sum(task.done() for task in tasks) > requests // 4:
                self._random.choice(tasks).cancel()
                await look()
            self._may_end.set()
        await self._proxy.core.server_state.in_flight.wait_empty()
        await look()

    async def _send(self) -> None:
        self.sent += 1
        model = self._random.choice(("chat", "chat", "chat", "nobody"))
        async with self._proxy.ask(model=model) as response:
            self.seen[response.status] += 1
            await response.read()


@pytest.mark.parametrize("seed", range(4))
async def test_every_request_is_accounted_for(proxy: ProxyHarness, seed: int) -> None:
    mix = Mix(proxy, seed)
    await proxy.server.close()
    await proxy.open(queue_max=3)
    for name in ("chat.1", "chat.2"):
        fake = await proxy.fake(mix.play, name, is_admitted=False)
        proxy.router.admit(replace(fake.upstream(), slots=3))
    last: Samples = {}

    async def look() -> None:
        page = await samples(proxy)
        ends = ("finished", "failed", "cancelled", "in_flight")
        ended = sum(total(page, f"corral_requests_{end}") for end in ends)
        assert total(page, "corral_requests_accepted") == ended
        counters = [key for key in last if key[0].startswith("corral") and "_total" in key[0]]
        assert all(page[key] >= last[key] for key in counters)
        last.clear()
        last.update(page)

    await mix.run(60, look)
    rejected = total(last, "corral_requests_rejected")
    assert total(last, "corral_requests_in_flight") == 0
    assert total(last, "corral_requests_waiting") == 0
    # A request whose client left may not have arrived, or its response not been seen.
    assert mix.seen.total() <= total(last, "corral_requests_accepted") + rejected <= mix.sent
    assert mix.seen[200] + mix.seen[400] <= total(last, "corral_requests_finished")
    assert mix.seen[404] + mix.seen[429] <= rejected
    assert min(mix.seen[200], mix.seen[404]) > 0  # 429 depends on timing

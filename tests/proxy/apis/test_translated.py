"""The plain endpoints, answered by the real engine and by instances that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import engine as engines
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

from proxy.errors import Unavailable
from supervisor.builds.discover import Engine

PLAIN = {"prompt": "abc", "max_tokens": 6}
GROUP = 'root ::= "\\U0001F600" [a-c]*'


@pytest.fixture(scope="module")
def socket(engine: Engine, slow_model: Path) -> Iterator[Path]:
    options = ["-c", "8192", "-np", "2", "-t", "1", "--no-kv-unified"]
    with engines.running(engine, slow_model, *options) as socket:
        yield socket


@pytest.fixture
async def real(proxy: ProxyHarness, socket: Path) -> ProxyHarness:
    proxy.router.admit(engines.upstream(socket, 2))
    return proxy


async def post(proxy: ProxyHarness, path: str, **members: Any) -> dict[str, Any]:
    async with proxy.http.post(path, json=members) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def refused(proxy: ProxyHarness, path: str, **members: Any) -> tuple[int, str]:
    async with proxy.http.post(path, json=members) as response:
        return response.status, (await response.json())["error"]["message"]


async def streamed(proxy: ProxyHarness, **members: Any) -> list[tuple[str, dict[str, Any]]]:
    async with proxy.http.post("/stream/generate", json=members) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return [event_of(part) for part in (await response.text()).split("\n\n") if part]


def event_of(text: str) -> tuple[str, dict[str, Any]]:
    name, data = text.split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_a_text_is_generated(real: ProxyHarness) -> None:
    """Seed 003: `POST /generate`."""
    found = await post(real, "/generate", **PLAIN)
    own = await post(
        real, "/completion", prompt="abc", n_predict=6, temperature=0, return_tokens=True
    )
    assert found == {"token_ids": own["tokens"], "text": own["content"], "num_generated": 6}
    (record,) = [event for event in real.events("request.finished") if event["kind"]][:1]
    assert (record["model"], record["decoded_tokens"]) == ("chat", 6)


async def test_texts_are_generated_in_the_order_of_their_prompts(real: ProxyHarness) -> None:
    """Seed 003: `POST /batch/generate`."""
    prompts = ["abc", "x", "lmn"]
    found = await post(real, "/batch/generate", prompts=prompts, max_tokens=4)
    singly = [await post(real, "/generate", prompt=prompt, max_tokens=4) for prompt in prompts]
    assert found == {"results": singly}
    assert (await post(real, "/batch/generate", prompts=["x"], max_tokens=4))["results"] == [
        singly[1]
    ]
    async with real.http.get("/corral/v1/batch") as response:
        assert (await response.json())["models"]["chat"]["total_queued"] == 4


async def test_the_error_of_one_prompt_is_the_answer(real: ProxyHarness) -> None:
    prompts = ["a", "the " * 9000, "b"]
    code, message = await refused(real, "/batch/generate", prompts=prompts, max_tokens=2)
    assert (code, "exceed" in message) == (400, True)


async def test_more_prompts_than_may_wait_are_refused(proxy: ProxyHarness) -> None:
    code, message = await refused(proxy, "/batch/generate", prompts=["a"] * 2000)
    assert (code, "prompts has 2000 entries, more than 1024" in message) == (400, True)


async def test_a_text_is_streamed(real: ProxyHarness) -> None:
    """Seed 003: `POST /stream/generate`."""
    whole = await post(real, "/generate", **PLAIN)
    *tokens, (name, done) = await streamed(real, **PLAIN)
    assert [data["token_id"] for _, data in tokens] == whole["token_ids"]
    assert "".join(data["text"] for _, data in tokens) == whole["text"]
    assert {name for name, _ in tokens} == {"token"}
    assert (name, done) == ("done", {"num_generated": 6})


async def test_a_letter_of_several_tokens_is_one_event(real: ProxyHarness) -> None:
    *tokens, (_, done) = await streamed(real, prompt="a", max_tokens=6, grammar=GROUP)
    assert tokens[0][1]["text"] == "\U0001f600"
    assert len(tokens) < done["num_generated"] == 6


async def test_a_text_is_tokenized(real: ProxyHarness) -> None:
    """Seed 003: `POST /tokenize`, TokenizeRequest text, model_id."""
    own = await post(real, "/tokenize", content="the user")
    assert set(own) == {"tokens"}
    assert await post(real, "/tokenize", text="the user", model_id="chat") == {
        "token_ids": own["tokens"],
        "num_tokens": len(own["tokens"]),
    }


async def test_texts_are_tokenized(real: ProxyHarness) -> None:
    """Seed 003: `POST /batch/tokenize`, BatchTokenizeRequest texts, BatchTokenizeResponse."""
    texts = ["the user", "", "on"]
    singly = [await post(real, "/tokenize", text=text) for text in texts]
    assert await post(real, "/batch/tokenize", texts=texts) == {"results": singly}
    assert singly[1] == {"token_ids": [], "num_tokens": 0}


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ([], "Texts array cannot be empty"),
        (None, "must be a list"),
        (["a", 1], "must be a list of strings"),
        (["a"] * 1025, "more than 1024"),
    ],
    ids=["none", "missing", "number", "many"],
)
async def test_texts_that_cannot_be_tokenized_are_a_bad_request(
    proxy: ProxyHarness, texts: object, reason: str
) -> None:
    """Seed 003: a batch without a text is an error of the client."""
    code, message = await refused(proxy, "/batch/tokenize", texts=texts)
    assert (code, reason in message) == (400, True)


async def test_the_error_of_one_text_is_the_answer(proxy: ProxyHarness) -> None:
    async def fail(call: Call) -> None:
        body = b'{"error":{"code":503,"message":"busy","type":"x"}}'
        await call.head(
            "Content-Type: application/json", f"Content-Length: {len(body)}", status="503 X"
        )
        await call.send(body)

    await proxy.fake(fail)
    assert await refused(proxy, "/batch/tokenize", texts=["a", "b"]) == (503, "busy")


async def test_the_models_are_listed(real: ProxyHarness) -> None:
    """Seed 003: `GET /models`."""
    async with real.http.get("/models") as response:
        answer = await response.json()
    assert [entry["id"] for entry in answer["data"]] == ["chat"]
    assert "models" in answer


@pytest.mark.parametrize("path", ["/generate", "/stream/generate", "/batch/generate"])
async def test_an_empty_prompt_is_a_bad_request(proxy: ProxyHarness, path: str) -> None:
    """Seed 003: an empty prompt is 400 on every endpoint that generates."""
    members: dict[str, Any] = {"prompts": ["a", ""]} if "batch" in path else {"prompt": ""}
    assert await refused(proxy, path, **members) == (400, "Prompt cannot be empty")


@pytest.mark.parametrize("path", ["/generate", "/stream/generate"])
async def test_the_engines_refusal_is_passed(real: ProxyHarness, path: str) -> None:
    code, message = await refused(real, path, prompt="a", grammar="root ::= (")
    assert (code, "grammar" in message) == (400, True)


async def test_a_text_beside_content_is_not_read(real: ProxyHarness) -> None:
    found = await post(real, "/tokenize", content="the user", text="on")
    assert found == await post(real, "/tokenize", content="the user")


async def test_another_instance_answers_from_the_beginning(proxy: ProxyHarness) -> None:
    half = asyncio.Event()

    async def say_half(call: Call) -> None:
        await call.head("Content-Type: application/json", "Content-Length: 20")
        await call.send(b'{"tokens":')
        half.set()
        await call.until_left()

    async def say_all(call: Call) -> None:
        await call.head("Content-Type: application/json", "Content-Length: 14")
        await call.send(b'{"tokens":[7]}')

    await proxy.fake(say_half)
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(post(proxy, "/tokenize", text="a"))
        await half.wait()
        await proxy.fake(say_all, "chat.2")
        await proxy.router.close("chat.1")
    assert asked.result() == {"token_ids": [7], "num_tokens": 1}


async def test_a_client_of_many_texts_is_told_when_to_return(proxy: ProxyHarness) -> None:
    proxy.loader.failure = Unavailable("chat is unavailable", retry_after_s=10)
    async with proxy.http.post("/batch/tokenize", json={"texts": ["a", "b"]}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "10")


async def test_a_client_that_leaves_a_stream_frees_the_slot(real: ProxyHarness) -> None:
    body = {"prompt": "a", "max_tokens": 4000}
    async with real.http.post("/stream/generate", json=body) as response:
        await response.content.readuntil(b"token_id")
        assert real.router.count_in_flight("chat.1") == 1
    await until(lambda: real.router.count_in_flight("chat.1") == 0)
    await until(lambda: any(event["status"] == 499 for event in real.events("request.finished")))


async def test_a_stream_that_breaks_ends_in_an_error_event(proxy: ProxyHarness) -> None:
    async def break_off(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"content":"b","tokens":[7],"stop":false}\n\n')
        call.drop()

    await proxy.fake(break_off)
    async with proxy.http.post("/stream/generate", json=PLAIN) as response:
        text = b""
        with pytest.raises(Exception, match="payload"):  # noqa: PT012 (each read adds to it)
            async for chunk in response.content.iter_any():
                text += chunk
    token, error = text.decode().split("\n\n")[:2]
    assert event_of(token) == ("token", {"token_id": 7, "text": "b"})
    assert event_of(error)[0] == "error"


async def test_an_answer_in_another_format_is_the_instances_fault(proxy: ProxyHarness) -> None:
    await proxy.fake()  # says {"ok": true}
    code, message = await refused(proxy, "/generate", **PLAIN)
    assert (code, "chat.1 answered in another format" in message) == (502, True)

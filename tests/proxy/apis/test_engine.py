"""The real engine behind the proxy, asked by OpenAI's own client."""

import asyncio
import io
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import openai
import pytest
from support import engine as engines
from support import tiny_gguf
from support.corral_cli import PATIENCE_S
from support.proxy_harness import ProxyHarness, free_port

from proxy.apis.llama_server import COMPLETION_CONTROL
from proxy.upstream.upstream import Upstream
from supervisor.builds.discover import Engine
from supervisor.builds.probe import library_path

KEY = "inner-key"
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def socket(engine_path: Path, engine_library_dirs: tuple[Path, ...]) -> Iterator[Path]:
    """Run the engine on one slot, with a model slow enough to be left while it speaks."""
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        model = Path(directory, "slow.gguf")
        tiny_gguf.make(model, mode="cycle", embd=256, heads=8, layers=12, ff=1024, ctx=8192)
        path = Path(directory, "engine.sock")
        options = ["--alias", "chat", "-c", "8192", "-np", "1", "-t", "1"]
        with Popen(
            [engine_path, "-m", model, "--host", path, *options],
            env={
                "LLAMA_API_KEY": KEY,
                "LLAMA_SERVER_ROUTER_PORT": "1",
                **library_path({}, engine_path, engine_library_dirs),
            },
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
        ) as engine:
            assert engine.stdout
            assert any(b'"state":"ready"' in line for line in engine.stdout)
            yield path
            engine.kill()


@pytest.fixture(scope="module")
def formatting(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run it with a chat template whose words the tiny vocabulary has, as a grammar needs."""
    template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ '<|im_start|>' }}"
    )
    path = tmp_path_factory.mktemp("models") / "formatting.gguf"
    model = tiny_gguf.make(path, chat_template=template)
    with engines.running(engine, model, "-c", "2048", "-np", "1", "-t", "1") as socket:
        yield socket


@pytest.fixture
async def client(proxy: ProxyHarness, socket: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    proxy.router.admit(upstream(socket, KEY))
    url = f"{proxy.server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="outer", max_retries=0) as client:
        yield client


def upstream(socket: Path, key: str) -> Upstream:
    return Upstream("chat.1", "chat", 1, str(socket), "", 0, key)


@pytest.mark.parametrize(
    "body",
    [
        b'{"n_predict": 2, "n_probs": 1, "prompt": "a", "n_predict": 5}',
        b'{"n_predict": 2, "prompt": "a", "n_probs": 1, "n\\u005fpredict": 5}',
        b'{"n_predict": 2, "stream": false, "prompt": "a", "x": "%s", "n_predict": 5}'
        % (b"a" * 1_100_000),
    ],
)
async def test_of_a_member_given_twice_the_engine_too_takes_the_last(
    proxy: ProxyHarness, socket: Path, body: bytes
) -> None:
    proxy.router.admit(upstream(socket, KEY))
    await proxy.open(max_body_bytes=2_000_000)
    async with proxy.http.post("/completion", data=io.BytesIO(body)) as response:
        answer = await response.json()
    assert (response.status, answer["tokens_predicted"]) == (200, 5)


async def test_the_web_ui_of_the_engine_has_a_separate_address(
    proxy: ProxyHarness, socket: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    await proxy.server.close()
    await proxy.open(engine_ui=address)
    proxy.router.admit(upstream(socket, KEY))
    async with proxy.http.get(f"http://{address}/") as response:
        assert response.content_type == "text/html"
        page = await response.text()
    links = re.findall(r'(?:src|href)="\./(_app/[^"]+)"', page)
    assert links
    for link in links:
        async with proxy.http.get(f"http://{address}/{link}") as response:
            assert response.status == 200


async def test_a_chat_is_answered(client: openai.AsyncOpenAI) -> None:
    """Seed 002: generate: a whole answer."""
    answer = await client.chat.completions.create(model="chat", messages=HELLO, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage
    assert answer.usage.completion_tokens == 8


async def test_a_chat_is_streamed_to_its_end(client: openai.AsyncOpenAI) -> None:
    """Seed 002: generate_stream: an answer as a stream."""
    stream = await client.chat.completions.create(
        model="chat", messages=HELLO, max_tokens=8, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("more", [{}, {"schema": {}}])
async def test_json_mode_gives_an_object_without_a_schema_too(
    proxy: ProxyHarness, formatting: Path, more: dict[str, Any]
) -> None:
    """The engine alone lets any text pass."""
    proxy.router.admit(engines.upstream(formatting, 1))
    json_mode = {"type": "json_object", **more}
    greedy = {"temperature": 0}
    chat = {"messages": HELLO, "max_tokens": 8, "response_format": json_mode, **greedy}
    text = {"format": json_mode}
    response = {"input": "hello", "max_output_tokens": 16, "text": text, **greedy}
    async with proxy.http.post("/v1/chat/completions", json=chat) as answer:
        assert answer.status == 200, await answer.text()
        said = (await answer.json())["choices"][0]["message"]["content"]
    async with proxy.http.post("/v1/responses", json=response) as answer:
        written = (await answer.json())["output"][-1]["content"][0]["text"]
    assert (said.lstrip()[:1], written.lstrip()[:1]) == ("{", "{"), (said, written)


async def test_json_mode_keeps_the_schema_or_the_grammar_of_a_request(
    proxy: ProxyHarness, formatting: Path
) -> None:
    """The engine alone ignores `json_schema` beside JSON mode. No model writes 731 by chance."""
    proxy.router.admit(engines.upstream(formatting, 1))
    schema = {"const": 731}
    json_mode = {"type": "json_object"}
    for more in (
        {"response_format": {**json_mode, "schema": schema}},
        {"response_format": json_mode, "json_schema": schema},
        {"response_format": json_mode, "grammar": 'root ::= "731"'},
    ):
        body = {"messages": HELLO, "max_tokens": 8, "temperature": 0, **more}
        async with proxy.http.post("/v1/chat/completions", json=body) as answer:
            content = (await answer.json())["choices"][0]["message"]["content"]
        assert content == "731", more


async def test_a_text_is_completed(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="chat", prompt="abc", max_tokens=4)
    assert answer.choices[0].text


async def test_what_the_engine_refuses_is_refused_in_its_own_words(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.APIStatusError, match="--embeddings"):
        await client.embeddings.create(model="chat", input="abc", encoding_format="float")


async def test_the_models_are_listed_and_found_by_name(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["chat"]
    assert (await client.models.retrieve("chat")).owned_by == "llama-corral"


async def test_a_wrong_model_name_is_answered_with_the_known_ones(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.NotFoundError, match="available models: chat") as failure:
        await client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert failure.value.code == "model_not_found"
    assert failure.value.request_id


async def test_bad_json_is_a_bad_request(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the body is not JSON"):
        await client.post("/chat/completions", cast_to=object, content=b'{"model": "chat"')


async def test_a_stream_cut_by_us_is_an_error_for_the_client(
    client: openai.AsyncOpenAI, proxy: ProxyHarness
) -> None:
    stream = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
    await anext(aiter(stream))
    await proxy.router.close("chat.1")
    with pytest.raises(openai.APIError, match=r"chat\.1 was stopped"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokens_of_a_request_are_counted(
    client: openai.AsyncOpenAI, proxy: ProxyHarness, prefix: str
) -> None:
    async with proxy.http.post(
        f"{prefix}/responses/input_tokens", json={"model": "chat", "input": "hello"}
    ) as response:
        counted = await response.json()
    assert (counted["object"], counted["input_tokens"] > 0) == ("response.input_tokens", True)
    async with proxy.ask(f"{prefix}/chat/completions/input_tokens") as response:
        assert await response.json() == counted
    async with proxy.ask(f"{prefix}/chat/completions/input_tokens", messages=1) as response:
        assert response.status == 400


async def test_a_running_completion_is_controlled(
    client: openai.AsyncOpenAI, proxy: ProxyHarness
) -> None:
    stream = await client.chat.completions.create(
        model="chat", messages=HELLO, stream=True, extra_body={"reasoning_control": True}
    )
    body = {"model": "chat", "id": (await anext(aiter(stream))).id, "action": "reasoning_end"}
    async with proxy.http.post(COMPLETION_CONTROL, json=body) as response:
        assert (response.status, (await response.json())["success"]) == (200, True)
    await stream.close()
    async with proxy.http.post(
        COMPLETION_CONTROL, json={**body, "id": "chatcmpl-gone"}
    ) as response:
        assert (response.status, (await response.json())["success"]) == (200, False)
    async with proxy.http.post(
        COMPLETION_CONTROL, json={**body, "action": "of-tomorrow"}
    ) as response:
        assert response.status == 400


async def test_adapters_are_listed(client: openai.AsyncOpenAI, proxy: ProxyHarness) -> None:
    async with proxy.http.get("/lora-adapters") as response:
        assert (response.status, await response.json()) == (200, [])


async def test_anthropics_page_is_served_by_the_engine(
    client: openai.AsyncOpenAI, proxy: ProxyHarness
) -> None:
    async with proxy.ask("/v1/messages", max_tokens=4) as response:
        assert (await response.json())["role"] == "assistant"


async def test_the_engines_own_pages_are_there_for_its_clients(
    client: openai.AsyncOpenAI, proxy: ProxyHarness
) -> None:
    async with proxy.http.post("/tokenize", json={"content": "abc"}) as response:
        assert (await response.json())["tokens"]
    async with proxy.http.get("/props?model=chat") as response:
        assert (await response.json())["total_slots"] == 1


async def test_the_engine_is_not_shown_header_fields_that_it_cannot_take(
    client: openai.AsyncOpenAI, proxy: ProxyHarness
) -> None:
    """It answers each of these with an empty body."""
    many = {f"X-{number}": "y" for number in range(100)}
    for headers in ({"Range": "none"}, {"X-Long": "y" * 12_000}, many):
        async with proxy.http.post("/tokenize", json={"content": "a"}, headers=headers) as response:
            assert response.status == 200


async def test_a_client_that_leaves_mid_stream_frees_its_slot(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="chat", messages=HELLO, max_tokens=8000, stream=True
    )
    await anext(aiter(stream))
    await stream.close()
    # The engine has one slot: an answer to the next is the proof that it is free.
    async with asyncio.timeout(PATIENCE_S):
        await client.chat.completions.create(model="chat", messages=HELLO, max_tokens=1)


async def test_an_engine_with_another_key_is_not_the_clients_fault(
    client: openai.AsyncOpenAI, proxy: ProxyHarness, socket: Path
) -> None:
    proxy.router.admit(upstream(socket, "another"))
    with pytest.raises(openai.InternalServerError, match="does not know our key"):
        await client.chat.completions.create(model="chat", messages=HELLO)

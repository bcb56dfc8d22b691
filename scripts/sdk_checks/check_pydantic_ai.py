"""Features of the Responses API that work with pydantic-ai; `OPENAI_BASE_URL` names the server."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings

from scripts.sdk_checks.outcome import reported

MODEL = OpenAIResponsesModel("smollm2")
COLD = OpenAIResponsesModelSettings(temperature=0, max_tokens=60)
CAPITAL = "What is the capital of France?"


class City(pydantic.BaseModel):
    name: str


class Weather(pydantic.BaseModel):
    sky: Literal["cold", "warm"]


def get_weather(city: Literal["Paris"]) -> str:
    """Tell the weather in a city."""
    return {"Paris": "warm"}[city]


async def whole() -> None:
    assert "Paris" in (await Agent(MODEL, model_settings=COLD).run(CAPITAL)).output


async def stream() -> None:
    async with Agent(MODEL, model_settings=COLD).run_stream(CAPITAL) as response:
        texts = [text async for text in response.stream_text(delta=True)]
    assert "Paris" in "".join(texts)


async def parse() -> None:
    agent = Agent(MODEL, model_settings=COLD, output_type=NativeOutput(City))
    assert (await agent.run(CAPITAL)).output.name


async def tools() -> None:
    agent = Agent(MODEL, model_settings=COLD, tools=[get_weather])
    assert (await agent.run("Weather in Paris?")).output == "It is warm in Paris."
    async with agent.run_stream("Weather in Paris?") as response:
        assert await response.get_output() == "It is warm in Paris."


async def combined() -> None:
    """With tools and a format, the model calls the tool, then answers in the format."""
    output = NativeOutput(Weather)
    agent = Agent(MODEL, model_settings=COLD, tools=[get_weather], output_type=output)
    whole = await agent.run("Weather in Paris?")
    assert _called(whole) == ["get_weather"]
    assert whole.output == Weather(sky="warm")
    async with agent.run_stream("Weather in Paris?") as streamed:
        assert await streamed.get_output() == Weather(sky="warm")
    assert _called(streamed) == ["get_weather"]


def _called(result: Any) -> list[str]:
    parts = [part for message in result.all_messages() for part in message.parts]
    return [part.tool_name for part in parts if part.part_kind == "tool-call"]


async def turns() -> None:
    await _talk(COLD)


async def stored() -> None:
    kept: Any = {**COLD, "openai_previous_response_id": "auto", "openai_store": True}
    await _talk(kept)


async def _talk(settings: OpenAIResponsesModelSettings) -> None:
    agent = Agent(MODEL, model_settings=settings)
    first = await agent.run(CAPITAL)
    second = await agent.run("And of Spain?", message_history=first.all_messages())
    assert second.output
    assert _tokens(second) > _tokens(first)


def _tokens(result: Any) -> int:
    usage = result.usage
    return int((usage() if callable(usage) else usage).input_tokens)


async def main() -> None:
    for check in (whole, stream, parse, tools, combined, turns, stored):
        with reported(check.__name__):
            await check()


asyncio.run(main())

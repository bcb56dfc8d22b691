"""Features of the Responses API in OpenAI's Agents SDK; `OPENAI_BASE_URL` names the server."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

from scripts.sdk_checks.outcome import reported

COLD = ModelSettings(temperature=0, max_tokens=60)
CAPITAL = "What is the capital of France?"


class City(pydantic.BaseModel):
    name: str


class Weather(pydantic.BaseModel):
    sky: Literal["cold", "warm"]


@function_tool  # type: ignore[untyped-decorator]
def get_weather(city: Literal["Paris"]) -> str:
    """Tell the weather in a city."""
    return {"Paris": "warm"}[city]


def agent(**options: Any) -> Agent[Any]:
    return Agent(name="a", **{"model": "smollm2", "model_settings": COLD, **options})


async def whole() -> None:
    assert "Paris" in (await Runner.run(agent(), CAPITAL)).final_output


async def stream() -> None:
    result = Runner.run_streamed(agent(), CAPITAL)
    kinds = [
        event.data.type
        async for event in result.stream_events()
        if event.type == "raw_response_event"
    ]
    assert "response.output_text.delta" in kinds
    assert "Paris" in result.final_output


async def parse() -> None:
    assert (await Runner.run(agent(output_type=City), CAPITAL)).final_output.name


async def tools() -> None:
    caller = agent(tools=[get_weather])
    assert (await Runner.run(caller, "Weather in Paris?")).final_output == "It is warm in Paris."
    streamed = Runner.run_streamed(caller, "Weather in Paris?")
    names = [event.name async for event in streamed.stream_events() if hasattr(event, "name")]
    assert "tool_output" in names
    assert streamed.final_output == "It is warm in Paris."


async def combined() -> None:
    """With tools and a format, the model calls the tool, then answers in the format."""
    caller = agent(tools=[get_weather], output_type=Weather)
    whole = await Runner.run(caller, "Weather in Paris?")
    assert "tool_call_output_item" in [item.type for item in whole.new_items]
    assert whole.final_output == Weather(sky="warm")
    streamed = Runner.run_streamed(caller, "Weather in Paris?")
    names = [event.name async for event in streamed.stream_events() if hasattr(event, "name")]
    assert "tool_output" in names
    assert streamed.final_output == Weather(sky="warm")


async def turns() -> None:
    first = await Runner.run(agent(), CAPITAL)
    more = [*first.to_input_list(), {"role": "user", "content": "And of Spain?"}]
    assert (await Runner.run(agent(), more)).final_output


async def stored() -> None:
    first = await Runner.run(agent(), CAPITAL)
    second = await Runner.run(agent(), "And of Spain?", previous_response_id=first.last_response_id)
    assert second.final_output


async def main() -> None:
    set_tracing_disabled(disabled=True)
    for check in (whole, stream, parse, tools, combined, turns, stored):
        with reported(check.__name__):
            await check()


asyncio.run(main())

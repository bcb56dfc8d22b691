"""Features of the Responses API that work with instructor; `OPENAI_BASE_URL` names the server.

Its mode `RESPONSES_TOOLS` sends the fields of an object as a tool and as a format, in one request,
and requires a call of the tool.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
import pydantic

from scripts.sdk_checks.outcome import reported

client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=instructor.Mode.RESPONSES_TOOLS)
MESSAGES: Any = [{"role": "user", "content": "Weather in Paris?"}]
COLD: Any = {"model": "smollm2", "temperature": 0, "max_tokens": 60, "max_retries": 0}


class City(pydantic.BaseModel):
    city: Literal["Paris"]


def whole() -> None:
    options: Any = {"response_model": City, "messages": MESSAGES, **COLD}
    found, response = client.create_with_completion(**options)
    assert found.city == client.create(**options).city == "Paris"
    assert [item.type for item in response.output] == ["function_call"]


def stream() -> None:
    (*_, last) = client.create_partial(response_model=City, messages=MESSAGES, **COLD)
    assert last.city == "Paris"


def items() -> None:
    found: Iterable[City] = client.create_iterable(
        response_model=City, messages=MESSAGES, **{**COLD, "max_tokens": 200}
    )
    assert {city.city for city in found} == {"Paris"}


for check in (whole, stream, items):
    with reported(check.__name__):
        check()

"""Prompts on an instance whose running streams come first."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


async def test_the_first_token_that_is_passed_on_lets_the_next_prompt_begin(
    proxy: ProxyHarness,
) -> None:
    """seed 001: BatchConfig.prefer_pure_decode."""
    may_speak = asyncio.Event()

    async def speak(call: Call) -> None:
        await call.begin_stream()
        if b"wait" in call.body:
            await may_speak.wait()
        await call.chunk(TOKEN)
        await call.until_left()

    fake = await proxy.fake(speak, is_admitted=False)
    proxy.router.admit(replace(fake.upstream(slots=4), prefer_pure_decode=True))

    async def prompt(text: str, stack: AsyncExitStack) -> None:
        messages = [{"role": "user", "content": text * 100}]
        await stack.enter_async_context(proxy.ask(stream=True, messages=messages))

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        await prompt("a stream ", stack)
        await fake.calls.get()
        group.create_task(prompt("please wait ", stack))
        await fake.calls.get()
        group.create_task(prompt("one more ", stack))
        await until(lambda: proxy.router.queues.stats()["chat"].interactive == 1)
        assert fake.calls.empty()
        may_speak.set()
        await fake.calls.get()

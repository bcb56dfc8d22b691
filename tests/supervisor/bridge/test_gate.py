"""On the real engine: what is saved of a conversation is known to the next proxy, and is proved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fakes.asks import ask
from fakes.barn import LONG, Barn
from fakes.house import until

from proxy.engine.slots import Reach
from proxy.line.dispatch import Dispatch
from proxy.line.rates import Timings
from supervisor.bridge.gate import Gate


class Proxy:
    """A proxy to which the one instance of a barn is admitted.

    Args:
        barn: With its instance up.
    """

    def __init__(self, barn: Barn) -> None:
        self.dispatch = Dispatch()
        gate = Gate(self.dispatch)
        gate.fleet = barn.fleet
        barn.fleet.chains = gate.chains
        self._barn = barn
        gate.admit(barn.replica.instance.snapshot())

    async def turn(self, *texts: str, lie: int | None = None) -> tuple[str, int | None, Timings]:
        """Have a turn answered; return the answer, the slot that was named, and what it cost.

        Args:
            texts: The conversation.
            lie: What the engine is made to say of its cache.
        """
        asked = ask(*texts)
        async with self.dispatch.lease(asked) as lease:
            slot = await self.dispatch.slot(lease, Reach.NAMED)
            said, figures = await self._barn.ask(asked.members["messages"], slot)
            cost = Timings.read(figures)
            assert cost
            told = cost if lie is None else _without_cache(cost, lie)
            lease.complete()
            lease.learn(told, {"content": said})
        return said, slot, cost


def _without_cache(cost: Timings, cached: int) -> Timings:
    whole = cost.prompt_tokens + cost.cached_tokens
    return replace(cost, cached_tokens=cached, prompt_tokens=whole - cached)


async def saved(barn: Barn) -> tuple[str, str, str]:
    """Have two conversations saved; return the next turn of the one."""
    async with barn.up():
        proxy = Proxy(barn)
        said, _, _ = await proxy.turn(f"hello {LONG}")
        await proxy.turn(f"other {LONG}")
    assert all(one.chain for one in barn.shelf.kept("chat"))
    return f"hello {LONG}", said, "and then?"


async def test_the_next_turn_names_the_slot_that_its_conversation_is_back_in(
    tiny_model: Path, runtime: Path
) -> None:
    turn = await saved(Barn(runtime, tiny_model))
    barn = Barn(runtime, tiny_model)
    async with barn.up():
        _, slot, cost = await Proxy(barn).turn(*turn)
        assert slot is not None
        assert cost.cached_tokens > 10 * cost.prompt_tokens
    assert not barn.told("slots.disproved")


async def test_an_engine_that_says_it_had_none_of_it_is_given_nothing_any_more(
    tiny_model: Path, runtime: Path
) -> None:
    turn = await saved(Barn(runtime, tiny_model))
    barn = Barn(runtime, tiny_model)
    async with barn.up():
        await Proxy(barn).turn(*turn, lie=3)
        await until(lambda: bool(barn.told("slots.disproved")))
    assert "did not use" in str(barn.replica.keeper.reason)

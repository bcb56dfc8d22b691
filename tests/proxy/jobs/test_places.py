"""How many lines are computed at once, and which comes next."""

import asyncio

import pytest

from proxy.jobs.places import Places, places_of
from proxy.jobs.settings import JobSettings


@pytest.mark.parametrize(
    ("slots", "changes", "places"),
    [
        (0, {}, 1),
        (1, {}, 1),
        (8, {}, 8),
        (8, {"max_in_flight": 3}, 3),
    ],
)
def test_a_model_has_as_many_places_as_slots(
    slots: int, changes: dict[str, int], places: int
) -> None:
    assert places_of(slots, JobSettings(**changes)) == places


async def waiting(places: Places, model: str, size_bytes: int = 1) -> asyncio.Task[object]:
    task = asyncio.get_running_loop().create_task(places.take(model, size_bytes))
    await asyncio.sleep(0)
    return task


async def test_batches_take_turns_and_models_do_not_wait_for_each_other() -> None:
    places = Places(lambda _: 1)
    held = await places.take("a", 1)
    first, second = await waiting(places, "a"), await waiting(places, "a")
    assert (await waiting(places, "b")).done()
    places.release(held)
    await asyncio.sleep(0)
    assert (first.done(), second.done()) == (True, False)


async def test_one_that_gives_up_leaves_its_place_to_the_next() -> None:
    places = Places(lambda _: 1)
    held = await places.take("a", 1)
    first, second = await waiting(places, "a"), await waiting(places, "a")
    places.release(held)
    first.cancel()  # it was granted the place in this very step
    await asyncio.wait([first])
    await asyncio.sleep(0)
    assert (first.cancelled(), second.done()) == (True, True)


async def test_large_lines_are_computed_one_by_one() -> None:
    places = Places(lambda _: 9)
    held = await places.take("a", 100 * 1024**2)
    other = await waiting(places, "b", 100 * 1024**2)
    assert not other.done()
    places.release(held)
    await asyncio.sleep(0)
    assert other.done()

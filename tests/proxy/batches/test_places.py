"""How many lines are computed at once, and which comes next."""

import asyncio

import pytest

from proxy.batches.runner import Place, Places, places_of
from proxy.settings import JobSettings


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


async def taken(places: Places, model: str, owner: str = "", size_bytes: int = 1) -> Place:
    place = Place(model, owner, size_bytes)
    await places.take(place)
    return place


async def waiting(
    places: Places, model: str, owner: str = "", size_bytes: int = 1
) -> asyncio.Task[Place]:
    task = asyncio.get_running_loop().create_task(taken(places, model, owner, size_bytes))
    await asyncio.sleep(0)
    return task


async def test_batches_take_turns_and_models_do_not_wait_for_each_other() -> None:
    places = Places(lambda _: 1)
    held = await taken(places, "a")
    first, second = await waiting(places, "a"), await waiting(places, "a")
    assert (await waiting(places, "b")).done()
    places.release(held)
    await asyncio.sleep(0)
    assert (first.done(), second.done()) == (True, False)


async def test_the_owner_with_the_fewest_places_comes_first() -> None:
    places = Places(lambda _: 2)
    held = [await taken(places, "a", "anna"), await taken(places, "a", "anna")]
    crowd = [await waiting(places, "a", "anna") for _ in range(3)]
    ben = await waiting(places, "a", "ben")
    places.release(held[0])
    await asyncio.sleep(0)
    assert ben.done()
    assert not any(client.done() for client in crowd)
    places.release(held[1])
    await asyncio.sleep(0)
    assert [client.done() for client in crowd] == [True, False, False]


async def test_a_place_is_given_back_once_and_can_be_taken_again() -> None:
    places = Places(lambda _: 1)
    place = await taken(places, "a")
    other = await waiting(places, "a")
    places.release(place)
    places.release(place)
    await asyncio.sleep(0)
    assert other.done()
    again = asyncio.get_running_loop().create_task(places.take(place))
    await asyncio.sleep(0)
    assert not again.done()
    places.release(await other)
    await asyncio.sleep(0)
    assert again.done()


async def test_one_that_gives_up_leaves_its_place_to_the_next() -> None:
    places = Places(lambda _: 1)
    held = await taken(places, "a")
    first, second = await waiting(places, "a"), await waiting(places, "a")
    places.release(held)
    first.cancel()  # it was granted the place in this very step
    await asyncio.wait([first])
    await asyncio.sleep(0)
    assert (first.cancelled(), second.done()) == (True, True)


async def test_large_lines_are_computed_one_by_one() -> None:
    places = Places(lambda _: 9)
    held = await taken(places, "a", "", 100 * 1024**2)
    other = await waiting(places, "b", "", 100 * 1024**2)
    assert not other.done()
    places.release(held)
    await asyncio.sleep(0)
    assert other.done()

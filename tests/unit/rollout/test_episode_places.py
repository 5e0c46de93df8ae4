"""Places for episodes."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goaly.rollout.episode_places import EpisodePlaces
from tests.virtual_time import turns

pytestmark = pytest.mark.timeout(60)


async def episode(places: EpisodePlaces, began: list[int], number: int, end: asyncio.Event) -> None:
    async with places:
        began.append(number)
        await end.wait()


async def test_episodes_get_places_in_the_order_in_which_they_ask():
    places, began, end = EpisodePlaces(2), [], asyncio.Event()
    tasks = [asyncio.create_task(episode(places, began, number, end)) for number in range(5)]
    await turns(5)
    assert (began, places.taken, places.waiting) == ([0, 1], 2, 3)
    end.set()
    await asyncio.gather(*tasks)
    assert began == [0, 1, 2, 3, 4]
    assert (places.taken, places.waiting) == (0, 0)


async def test_a_higher_limit_lets_waiting_episodes_begin_and_a_lower_one_ends_none():
    places, began, ends = EpisodePlaces(1), [], [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(episode(places, began, number, ends[number])) for number in range(4)]
    await turns(5)
    assert began == [0]
    places.limit(3)
    await turns(5)
    assert began == [0, 1, 2]
    places.limit(1)
    for number in (0, 1):
        ends[number].set()
        await turns(5)
        assert began == [0, 1, 2]
    ends[2].set()
    await turns(5)
    assert began == [0, 1, 2, 3]
    ends[3].set()
    await asyncio.gather(*tasks)


@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.just(0)),
            st.tuples(st.sampled_from(["cancel", "end"]), st.integers(0, 20)),
            st.tuples(st.just("limit"), st.integers(1, 4)),
            st.tuples(st.just("turn"), st.just(0)),
        ),
        max_size=40,
    )
)
def test_no_place_is_lost_or_given_twice_whenever_episodes_are_cancelled(moves):
    async def play() -> None:
        places, began, limit = EpisodePlaces(2), [], 2
        running: list[tuple[asyncio.Task[None], asyncio.Event]] = []
        for move, number in moves:
            if move == "ask":
                end = asyncio.Event()
                running.append((asyncio.create_task(episode(places, began, len(running), end)), end))
            elif move == "limit":
                places.limit(limit := number)
            elif move == "turn":
                await turns(3)
            elif number < len(running):
                task, end = running[number]
                _ = task.cancel() if move == "cancel" else end.set()
        await turns(5)
        under_way = [task for task, _ in running if not task.done()]
        assert places.taken + places.waiting == len(under_way)
        assert places.taken >= min(limit, len(under_way))
        for _, end in running:
            end.set()
        for task, _ in running:
            with suppress(asyncio.CancelledError):
                await task
        assert (places.taken, places.waiting) == (0, 0)

    asyncio.run(play())

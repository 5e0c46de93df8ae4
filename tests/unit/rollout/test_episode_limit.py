"""`rollout.concurrency=auto`, over workers and engines that answer as they are told."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from goaly.generate.request import GeneratorStats
from goaly.rollout.episode_limit import EpisodeLimit
from goaly.rollout.group_runner import GroupSummary


@dataclass
class Load:
    """Engines with room for so many requests, and more episodes than there are places."""

    room: int
    cache_use: float = 0.5
    preemptions: int = 0
    in_tools: float = 0.0
    """Share of the episodes that are at no engine."""
    count: int = 2
    limits: list[int] = field(default_factory=list)

    async def stats(self) -> list[GeneratorStats]:
        asking = int(self.count * self.limits[-1] * (1 - self.in_tools)) if self.limits else 0
        queued = max(0, asking - self.room)
        one = GeneratorStats(
            max_running=self.room, cache_use=self.cache_use, queued=queued, preemptions=self.preemptions
        )
        return [one]

    async def limit_episodes(self, most: int) -> list[tuple[int, int]]:
        self.limits.append(most)
        return [(most, 1)] * self.count


def summary(failed: str | None = None) -> GroupSummary:
    return GroupSummary(ticket=0, prompt_id="p", rewards=() if failed else (1.0,) * 8, failed=failed)


async def followed(load: Load, groups: int, *, groups_per_step: int = 4, failed: str | None = None) -> EpisodeLimit:
    limit = EpisodeLimit(load, load.stats, groups_per_step=groups_per_step, group_size=8)
    await limit.start()
    for _ in range(groups):
        limit.ended(summary(failed))
        await limit.measure()
    return limit


async def test_it_begins_with_the_room_of_the_engines_and_a_tenth_more():
    limit = await followed(Load(room=100), 0)
    assert limit.value == 111  # 1.1 * 100, rounded up


async def test_episodes_that_are_in_tools_most_of_the_time_let_it_grow_until_the_engines_have_work():
    limit = await followed(Load(room=100, in_tools=0.8), 2000)
    assert 400 <= limit.value <= 700


async def test_it_shrinks_to_what_the_engines_run_where_requests_queue():
    load = Load(room=400)
    limit = await followed(load, 0)
    load.room = 100
    for _ in range(2000):
        limit.ended(summary())
        await limit.measure()
    assert 100 <= limit.value <= 145


@given(uses=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), max_size=50), step=st.integers(1, 20))
async def test_a_step_always_has_places_for_all_its_episodes(uses, step):  # rollout-10
    load = Load(room=1)
    limit = await followed(load, 0, groups_per_step=step)
    for use, preempted in uses:
        load.cache_use = use
        load.preemptions += preempted
        limit.ended(summary())
        await limit.measure()
        assert limit.value >= 8 * step
        assert load.count * load.limits[-1] >= 8 * step


async def test_it_holds_while_groups_fail():
    limit = await followed(Load(room=100, in_tools=0.8), 100, failed="EnvironmentFailed: it was full")
    assert limit.value == 111

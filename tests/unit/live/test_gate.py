"""The loop of the gate over versions of known quality, and the split of traffic."""

import asyncio
import random
from pathlib import Path

import pytest

from goaly.live.decision import Decision, OnRegression
from goaly.live.gate import Gate
from goaly.live.gate_records import Chosen, ComparedPair, Decided, GateLog, JudgedAnswer, RolledBack, gate_records
from goaly.live.gate_settings import GateSettings
from goaly.live.promotion import Promotion
from goaly.live.traffic_split import Arm, TrafficSplit, arm_of_replica
from goaly.live.trial import SHADOW
from goaly.prompts.prompt import Message, Prompt

SETTINGS = GateSettings(margin=0.2, error_rate=0.05, pairs=400, concurrent=4, mix_bound=0.5)
PROBLEMS = [
    Prompt(id=f"problem-{n}", source="test", messages=(Message(role="user", content=f"{n}"),)) for n in range(5)
]


class Trained:
    """A policy whose versions are right with these probabilities. Version v follows from version v - 1, or, after a
    roll back, from the served one."""

    def __init__(self, quality: dict[int, float]):
        self.quality = quality
        self.served: list[int] = []
        self.on_trial: list[int] = []
        self.rolled_back: list[tuple[int, int]] = []
        self.trained = 0
        self.stopped = False
        self.ended = asyncio.Event()
        """No further version comes."""

    async def serve(self, version: int) -> None:
        self.served.append(version)

    async def candidate(self, after: int) -> int:
        while self.trained <= after:
            if self.trained + 1 not in self.quality:
                self.ended.set()
                await asyncio.Future()
            self.trained += 1
        self.on_trial.append(self.trained)
        return self.trained

    async def resume(self, candidate: int) -> bool:
        self.on_trial.append(candidate)
        return True

    async def roll_back(self, version: int) -> int:
        self.rolled_back.append((version, self.trained))
        return self.trained

    async def stop_training(self) -> None:
        self.stopped = True
        self.ended.set()

    def decided(self, decision: Decided) -> None:
        pass

    async def answer(self, arm: Arm, version: int, prompt: Prompt, name: str) -> JudgedAnswer | None:
        chance = random.Random(f"{name}/{version}")
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        assert version == (self.served[-1] if arm is Arm.SERVED else self.on_trial[-1])
        return JudgedAnswer(score=float(chance.random() < self.quality[version]), action="answer", length=0.1)


async def run(policy: Trained, file: Path, settings: GateSettings = SETTINGS, **options: object) -> list[object]:
    """The records of the gate once no further version comes."""
    log = GateLog(file)
    promotion = Promotion(settings, log.write, earlier=list(gate_records(file)), **options)
    gate = Gate(promotion, settings, policy, PROBLEMS, policy)
    await gate.open()
    running = asyncio.ensure_future(gate.run())
    ended = asyncio.ensure_future(policy.ended.wait())
    await asyncio.wait([running, ended], timeout=60, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    assert policy.ended.is_set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    log.close()
    return list(gate_records(file))


def decisions(records: list[object]) -> list[tuple[int, Decision]]:
    return [(one.candidate, one.decision) for one in records if isinstance(one, Decided)]


async def test_only_versions_that_are_not_worse_are_served(tmp_path: Path):
    policy = Trained({0: 0.5, 1: 0.9, 2: 0.1, 3: 0.95})
    records = await run(policy, tmp_path / "gate.jsonl")
    assert decisions(records) == [(1, Decision.PROMOTED), (2, Decision.REFUSED), (3, Decision.PROMOTED)]
    assert policy.served == [0, 1, 3]
    assert policy.rolled_back == [(1, 2)]
    assert [one for one in records if isinstance(one, RolledBack)] == [RolledBack(served=1, newest=2)]


async def test_a_regression_can_stop_training_while_the_served_version_stays(tmp_path: Path):
    policy = Trained({0: 0.9, 1: 0.1, 2: 0.9})
    await run(policy, tmp_path / "gate.jsonl", on_regression=OnRegression.STOP)
    assert policy.stopped
    assert (policy.served, policy.trained, policy.rolled_back) == ([0], 1, [])


async def test_problems_are_drawn_with_replacement_and_numbers_have_no_gaps(tmp_path: Path):
    records = await run(Trained({0: 0.5, 1: 0.9}), tmp_path / "gate.jsonl")
    pairs = [one for one in records if isinstance(one, ComparedPair)]
    assert len({one.prompt for one in pairs}) == len(PROBLEMS) < len(pairs)
    assert {one.number for one in pairs} >= set(range(len(pairs) - SETTINGS.concurrent))


async def test_a_gate_that_ends_at_any_pair_goes_on_and_decides_the_same(tmp_path: Path):
    quality = {0: 0.7, 1: 0.9, 2: 0.2, 3: 0.9}
    whole = decisions(await run(Trained(quality), tmp_path / "whole.jsonl"))
    file = tmp_path / "broken.jsonl"
    for cut in (0.2, 0.5, 0.8, 1.0):
        await run(Trained(quality), tmp_path / "gate.jsonl")
        lines = (tmp_path / "gate.jsonl").read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(lines[: int(cut * len(lines))]))
        (tmp_path / "gate.jsonl").unlink()
        policy = Trained(quality)
        chosen = [one.candidate for one in gate_records(file) if isinstance(one, Chosen)]
        policy.trained = max([0, *chosen])
        assert decisions(await run(policy, file)) == whole
        file.unlink()


async def test_a_candidate_whose_weights_are_lost_gives_way(tmp_path: Path):
    class Forgetful(Trained):
        async def resume(self, candidate: int) -> bool:
            return False

    file, quality = tmp_path / "gate.jsonl", {0: 0.5, 1: 0.9, 2: 0.9}
    await run(Trained(quality), file)
    lines = file.read_bytes().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if b'"Chosen"' in line)
    file.write_bytes(b"".join(lines[: first + 3]))
    policy = Forgetful(quality)
    policy.trained = 1
    assert decisions(await run(policy, file)) == [(1, Decision.UNDECIDED), (2, Decision.PROMOTED)]


async def test_recorded_prompts_of_users_are_compared_by_the_judge(tmp_path: Path):
    class Prompts:
        async def draw(self, name: str) -> Prompt:
            return Prompt(id="a user's", source="live", messages=())

    settings = GateSettings(margin=0.2, mix_bound=0.5, shadow_pairs=200)
    policy, file = Trained({0: 0.5, 1: 0.95}), tmp_path / "gate.jsonl"
    log = GateLog(file)
    gate = Gate(Promotion(settings, log.write), settings, policy, PROBLEMS, policy, Prompts(), policy)
    await gate.open()
    running = asyncio.ensure_future(gate.run())
    await asyncio.wait_for(policy.ended.wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    log.close()
    pairs = [one for one in gate_records(file) if isinstance(one, ComparedPair)]
    assert any(one.comparison == SHADOW and one.prompt == "a user's" for one in pairs)
    assert decisions(list(gate_records(file))) == [(1, Decision.PROMOTED)]


def test_a_share_of_new_conversations_goes_to_the_candidate_and_stays_there():
    split = TrafficSplit(None, None, share=0.25)
    assert split.arm_of("before") is Arm.SERVED
    split.use(3)
    assert split.arm_of("before") is Arm.SERVED
    first = {f"c{n}": split.arm_of(f"c{n}") for n in range(2000)}
    assert 400 <= list(first.values()).count(Arm.CANDIDATE) <= 600
    assert {name: split.arm_of(name) for name in first} == first
    split.use(None)
    assert {split.arm_of(name) for name in first} == {Arm.SERVED}
    split.use(5)
    assert {split.arm_of(name) for name in first} == {Arm.SERVED}  # those of candidate 3 have gone on with another


@pytest.mark.parametrize(("share", "arm"), [(0.0, Arm.SERVED), (1.0, Arm.CANDIDATE)])
def test_none_or_all_new_conversations_can_see_the_candidate(share: float, arm: Arm):
    split = TrafficSplit(None, None, share=share)
    split.use(1)
    assert {split.arm_of(f"{n}") for n in range(200)} == {arm}


async def test_a_request_goes_to_the_arm_of_its_conversation():
    class Sampler:
        def __init__(self) -> None:
            self.asked: list[str] = []

        async def generate(self, request_id: str, *rest: object) -> None:
            self.asked.append(request_id)

    served, candidate = Sampler(), Sampler()
    split = TrafficSplit(served, candidate, share=1.0)
    await split.generate("one", [], None, session="a")
    split.use(4)
    await split.generate("two", [], None, session="b")
    await split.generate("three", [], None, session="a")
    await split.generate("four", [], None)
    assert (served.asked, candidate.asked) == (["one", "three", "four"], ["two"])


def test_the_last_replica_and_those_in_its_place_are_the_candidates():
    assert [arm_of_replica(name, 3) for name in ("generator-0", "generator-1-4", "generator-2", "generator-2-1")] == [
        Arm.SERVED,
        Arm.SERVED,
        Arm.CANDIDATE,
        Arm.CANDIDATE,
    ]

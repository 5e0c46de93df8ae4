"""`max_staleness=0` is synchronous RL: the same parameters, bit for bit, as a plain loop over the same trajectories.

Its final evaluation never ends, so that Ctrl-C during that can be seen too.
"""

import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import REWARDED, START_SECONDS, LaunchedRun, gone_within, orphaned_memory, orphaned_within
from safetensors.torch import load_file

from goaly.backlog.batch import build_batch
from goaly.backlog.settings import BacklogSettings
from goaly.journal.export import journal
from goaly.journal.run_folder import RunFolder
from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.reward.settings import AdvantageSettings
from goaly.train.settings import OptimizerSettings, ScheduleSettings, TrainerSettings
from goaly.train.train_engine import TrainEngine
from goaly.trajectory import Group, Outcome, Trajectory, Turn, token_data

STEPS = 10
pytestmark = pytest.mark.timeout(400)
BACKLOG = BacklogSettings(groups_per_step=2, group_size=4, max_staleness=0, window=2, row_length=128)
TRAINER = TrainerSettings(optimizer=OptimizerSettings(lr=1e-3), schedule=ScheduleSettings(warmup_steps=5))


def groups_of(rollouts: list[dict[str, Any]]) -> Iterator[Group]:
    """The journal's groups, in order of admission."""
    by_ticket: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in rollouts:
        by_ticket[entry["ticket"]].append(entry)
    for ticket in sorted(by_ticket):
        entries = sorted(by_ticket[ticket], key=lambda entry: entry["sample"])
        samples = tuple(trajectory(entry) for entry in entries)
        yield Group(ticket=ticket, prompt_id=entries[0]["prompt_id"], source="arithmetic", samples=samples)


def trajectory(entry: dict[str, Any]) -> Trajectory:
    versions = [version for version, count in entry["versions"] for _ in range(count)]
    rewards = torch.zeros(len(entry["tokens"]))
    for position, reward in entry["rewards"]:
        rewards[position] = reward
    columns = {
        "tokens": torch.tensor(entry["tokens"]),
        "trained": torch.tensor([version >= 0 for version in versions]),
        "sampler_logprobs": torch.tensor(entry["logprobs"]),
        "sampler_versions": torch.tensor(versions, dtype=torch.int32),
        "rewards": rewards,
    }
    return Trajectory(
        tokens=token_data(columns),
        prompt_id=entry["prompt_id"],
        sample_index=entry["sample"],
        turns=tuple(Turn(author=author, start=start, stop=stop) for author, start, stop in entry["turns"]),
        environment=entry["environment"],
        outcome=Outcome(entry["outcome"]),
    )


def plain_loop(groups: list[Group], model: Path, output: Path) -> None:
    """Synchronous GRPO without queue, actors or weight store: take the next groups, step, repeat."""
    engine = TrainEngine(ModelSettings(path=str(model)), TRAINER)
    loss = PolicyObjective(LossSettings())
    for step in range(STEPS):
        of_step = groups[step * BACKLOG.groups_per_step : (step + 1) * BACKLOG.groups_per_step]
        batch = build_batch(
            step, of_step, settings=BACKLOG, advantage_settings=AdvantageSettings(), dp_ranks=1, pad_token=0
        )
        engine.train_step(batch.ranks[0], loss)
    engine.save_hf(output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """A synchronous run that Ctrl-C stopped during its final evaluation."""

    run: LaunchedRun
    survivors: list[int]
    left_in_memory: set[str]


@pytest.fixture(scope="module")
def interrupted(launch_shared: Callable[..., LaunchedRun]) -> Interrupted:
    before = orphaned_memory()
    run = launch_shared(
        f"steps={STEPS}",
        "backlog.max_staleness=0",
        REWARDED,
        f"trainer.optimizer.lr={TRAINER.optimizer.lr}",
        f"trainer.schedule.warmup_steps={TRAINER.schedule.warmup_steps}",
        f"trainer.schedule.decay={TRAINER.schedule.decay}",
        f"trainer.schedule.min_lr_factor={TRAINER.schedule.min_lr_factor}",
        module="tests.loop.hanging_evaluation",
    )
    run.wait_for_text("the final evaluation hangs", START_SECONDS)
    processes = run.processes()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    return Interrupted(run=run, survivors=gone_within(processes), left_in_memory=orphaned_within(before))


def test_ctrl_c_during_the_final_evaluation_does_not_lose_the_policy(interrupted: Interrupted) -> None:
    run = interrupted.run
    assert (run.folder / "policy" / "model.safetensors").exists()
    assert (run.summary()["status"], run.summary()["policy_version"]) == ("interrupted", STEPS)
    assert interrupted.survivors == []
    assert interrupted.left_in_memory == set()


def test_staleness_zero_equals_a_plain_loop_to_the_last_bit(
    interrupted: Interrupted, tiny_model_folder: Path, tmp_path: Path
) -> None:
    run = interrupted.run
    rollouts = list(journal(RunFolder.of(run.folder), tokens=True))
    for entry in rollouts:
        step = entry["ticket"] // BACKLOG.groups_per_step
        written = {version for version, _ in entry["versions"] if version >= 0}
        assert written == {step}  # no generation started before its weights were in
    assert all(step["age/max"] == 0 for step in run.lines("metrics.jsonl"))
    assert all(step["grad_norm"] > 0 for step in run.lines("metrics.jsonl"))

    plain_loop(list(groups_of(rollouts)), tiny_model_folder, tmp_path / "plain")
    ours = load_file(run.folder / "policy" / "model.safetensors")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    start = load_file(tiny_model_folder / "model.safetensors")
    assert ours.keys() == plain.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, plain[name]), name
        assert not torch.equal(tensor, start[name]), name

"""A teacher and its student on real engines: the same path, the same temperature, and the student comes closer."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from goaly.backlog.batch import Batch, add_column, annotation, build_batch
from goaly.backlog.settings import BacklogSettings
from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import DistillSettings, LossSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.reward.settings import AdvantageSettings
from goaly.train.settings import OptimizerSettings, TrainerSettings
from goaly.train.train_engine import TrainEngine
from goaly.trajectory import TOP_TOKENS, Trajectory
from tests.unit.trajectories import grouped, sampled

pytestmark = pytest.mark.timeout(300)

SETTINGS = TrainerSettings(
    temperature=0.7, microbatch_rows=1, logprob_chunk=7, optimizer=OptimizerSettings(lr=3e-3, weight_decay=0.0)
)
ADVANTAGES = AdvantageSettings(name="group_mean")
TOP_K = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student's and a teacher's."""
    size = TinyModel(layers=1, dim=32, heads=2, kv_heads=1, head_dim=16, hidden_dim=32)
    student, teacher = (
        write_tiny_model(tmp_path_factory.mktemp(f"model{seed}"), replace(size, seed=seed)) for seed in (0, 1)
    )
    return student, teacher


def engine(folder: Path, *, trains: bool = True, settings: TrainerSettings = SETTINGS) -> TrainEngine:
    return TrainEngine(ModelSettings(path=str(folder)), settings, trains=trains)


def samples(context: list[int] | None) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(5)
    made = [
        sampled(length, index=index, tokens=torch.randint(0, 32, (length,), generator=generator).tolist())
        for index, length in enumerate((9, 14, 6, 11))
    ]
    return made if context is None else [one.taught(context) for one in made[:2]] + made[2:]


def judged(teacher: TrainEngine, of: list[Trajectory], taught, top_k: int, *, row_length: int = 24) -> Batch:
    """The batch of these samples with the teacher's columns."""
    batch = build_batch(
        0,
        [grouped(0, of)],
        settings=BacklogSettings(groups_per_step=1, group_size=len(of), row_length=row_length),
        advantage_settings=ADVANTAGES,
        dp_ranks=1,
        pad_token=0,
        taught=taught,
    )
    assert batch.lessons is not None
    for key, column in teacher.judgement(batch.lessons.ranks[0].rows, top_k).items():
        add_column(batch, annotation(batch, 0, key, column), ADVANTAGES)
    return batch


def test_a_teacher_gives_the_log_probs_of_its_own_context_at_the_runs_temperature(folders):
    _, folder = folders
    teacher, context = engine(folder, trains=False), [3, 1, 4, 1, 5]
    batch = judged(teacher, samples(context), "all", TOP_K)
    by_hand = []
    for one in samples(context):
        tokens = one.tokens["tokens"]
        written = tokens[1:] if one.teacher_contexts else tokens
        before = torch.tensor(context) if one.teacher_contexts else tokens[:0]
        whole = sampled(len(before) + len(written), tokens=torch.cat([before, written]).tolist())
        alone = judged(teacher, [whole], "all", TOP_K)  # every token but the first
        rows = alone.ranks[0].rows
        last = len(whole) - len(tokens) + 1
        by_hand.append({key: rows[key][0, last : len(whole)] for key in ("teacher_logprobs", TOP_TOKENS)})
    rows = batch.ranks[0].rows
    mask = rows["trained"]
    order = [place for row in batch.placement[0] for place in row]
    for key in ("teacher_logprobs", TOP_TOKENS):
        expected = torch.cat([by_hand[place][key] for place in order])
        torch.testing.assert_close(rows[key][mask], expected, atol=1e-5, rtol=1e-5)
    cold = engine(folder, trains=False, settings=dataclasses.replace(SETTINGS, temperature=1.0))
    other = judged(cold, samples(context), "all", 0)
    assert (other.ranks[0].rows["teacher_logprobs"][mask] - rows["teacher_logprobs"][mask]).abs().max() > 1e-3


@pytest.mark.parametrize("by", ["advantage", "reverse_kl", "forward_kl"])
def test_the_gradient_is_that_of_the_mean_over_taught_tokens_on_any_packing(folders, by: str):
    student, teacher = engine(folders[0]), engine(folders[1], trains=False)
    distill = DistillSettings(by=by, tokens="context", **({} if by == "advantage" else {"top_k": TOP_K}))
    objective = PolicyObjective(LossSettings(name="reinforce", distill=distill))
    found = []
    for row_length, microbatch_rows in ((24, 1), (24, 2), (64, 1)):
        batch = judged(teacher, samples([7, 8]), "context", TOP_K, row_length=row_length)
        packed = batch.ranks[0]
        assert packed.batch_taught_tokens == 8 + 13
        counts = objective.denominator(packed), packed.batch_taught_tokens
        student.forward_backward(packed.rows.split(microbatch_rows), objective, *counts)
        found.append(
            {name: one.grad.clone() for name, one in student._model.named_parameters() if one.grad is not None}
        )
        student._optimizer._optimizers.zero_grad()
    for other in found[1:]:
        for name, one in found[0].items():
            torch.testing.assert_close(other[name], one, atol=2e-6 * one.abs().max().item() + 1e-8, rtol=2e-4)


@pytest.mark.parametrize("by", ["reverse_kl", "forward_kl"])
def test_a_student_comes_closer_to_its_teacher(folders, by: str):
    student, teacher = engine(folders[0]), engine(folders[1], trains=False)
    batch = judged(teacher, samples(None), "all", TOP_K)
    objective = PolicyObjective(LossSettings(reward_weight=0.0, distill=DistillSettings(by=by, top_k=TOP_K)))
    metrics = [student.train_step(batch.ranks[0], objective) for _ in range(20)]
    assert 0 < metrics[-1]["distill/divergence"] < 0.7 * metrics[0]["distill/divergence"]


def test_the_advantage_brings_each_token_to_the_probability_that_its_teacher_gives_it(folders):
    student, teacher = engine(folders[0]), engine(folders[1], trains=False)
    rows = judged(teacher, samples(None), "all", 0).ranks[0]
    objective = PolicyObjective(LossSettings(name="reinforce", reward_weight=0.0, distill=DistillSettings()))

    def apart() -> float:
        difference = student.logprobs(rows.rows) - rows.rows["teacher_logprobs"]
        return difference[rows.rows["trained"]].abs().mean().item()

    before = apart()
    for _ in range(30):
        student.train_step(rows, objective)
    assert apart() < 0.7 * before


def test_a_batch_in_which_the_teacher_judges_nothing_changes_no_parameter(folders):
    student, teacher = engine(folders[0]), engine(folders[1], trains=False)
    before = student.digest()
    batch = judged(teacher, samples(None), "context", TOP_K)
    assert batch.ranks[0].batch_taught_tokens == 0
    loss = LossSettings(reward_weight=0.0, distill=DistillSettings(by="reverse_kl", top_k=TOP_K, tokens="context"))
    metrics = student.train_step(batch.ranks[0], PolicyObjective(loss))
    assert (metrics["loss"], metrics["grad_norm"], student.digest()) == (0.0, 0.0, before)

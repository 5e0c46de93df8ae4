"""A teacher's actor reads the lessons of a real queue, and its values come to the tokens of the batch."""

from pathlib import Path

import pytest
import torch
from spawned import spawn

from goaly.backlog.batch import add_column, annotation, build_batch, column_of_samples
from goaly.backlog.settings import BacklogSettings
from goaly.backlog.trajectory_queue import TrajectoryQueue
from goaly.losses.settings import DistillSettings, LossSettings
from goaly.models.settings import ModelSettings
from goaly.reward.settings import AdvantageSettings
from goaly.train.reference import ReferenceModel
from goaly.train.settings import ReferenceSettings, TrainerSettings
from goaly.train.train_engine import TrainEngine
from goaly.trajectory import LATER_TOP, TAUGHT
from tests.unit.trajectories import grouped, sampled

pytestmark = pytest.mark.timeout(300)  # two processes import torchtitan

SETTINGS = TrainerSettings(fsdp=2, temperature=0.7, microbatch_rows=1)
BACKLOG = BacklogSettings(groups_per_step=1, group_size=3, row_length=24)
ADVANTAGES = AdvantageSettings(name="group_mean")
LOSS = LossSettings(distill=DistillSettings(by="reverse_kl", top_k=4, tokens="context"))


async def test_one_rank_of_a_teacher_judges_the_lessons_of_two_ranks(tiny_model_folder: Path):
    model = ModelSettings(path=str(tiny_model_folder))
    samples = [sampled(9, tokens=range(3, 12)).taught([1, 2, 3]), sampled(20, tokens=range(20)).taught([5]), sampled(7)]
    mesh = spawn("trainer", name="alone")
    queue = mesh.spawn("queue", TrajectoryQueue, BACKLOG, ADVANTAGES, dp_ranks=2, pad_token=0, taught="context")
    reference = mesh.spawn(
        "reference", ReferenceModel, ReferenceSettings(), SETTINGS, model, queue, loss=LOSS, compares=False
    )
    ticket = await queue.admit.call_one()
    group = grouped(ticket.index, samples)
    assert await queue.report.call_one(group)
    handle = await queue.next_batch.call_one()
    assert handle.metrics["distill/taught_share"] == pytest.approx(27 / 33)
    await reference.start.call()
    await reference.annotate.call(handle)

    parts = {"settings": BACKLOG, "advantage_settings": ADVANTAGES, "pad_token": 0, "taught": "context"}
    alone = build_batch(0, [group], dp_ranks=1, **parts)
    assert alone.lessons is not None
    engine = TrainEngine(model, TrainerSettings(temperature=0.7), trains=False)
    for key, column in engine.judgement(alone.lessons.ranks[0].rows, 4).items():
        add_column(alone, annotation(alone, 0, key, column), ADVANTAGES)
    divided = build_batch(0, [group], dp_ranks=2, **parts)
    for rank, packed in enumerate(divided.ranks):
        rows = await queue.rows.call_one(0, rank)
        assert "reference_logprobs" not in rows.rows.keys()  # noqa: SIM118
        for key in ("teacher_logprobs", *LATER_TOP, TAUGHT):
            packed.rows[key] = rows.rows[key]
    for key in ("teacher_logprobs", *LATER_TOP, TAUGHT):
        one, other = (torch.cat(column_of_samples(batch, key)) for batch in (divided, alone))
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert column_of_samples(divided, "teacher_logprobs")[2].abs().max() == 0
    await reference.close.call()
    await mesh.stop()

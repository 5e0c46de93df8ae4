"""Two ranks that divide a model end a step with the same error if one of them computes an operation wrongly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from goaly.base.errors import ParityError
from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.run.rendezvous import in_ranks
from goaly.train.rank_thread import join_process_group
from goaly.train.settings import OptimizerSettings, TrainerSettings
from goaly.train.train_engine import TrainEngine
from goaly.trajectory import EXPERT_CHOICES, PackedRows
from tests.unit.train.batches import documents, pack

pytestmark = pytest.mark.slow

ROWS = 4
CHOICES = (2, 6, 3)
SIZES = {
    "dense": TinyModel(layers=2),
    "experts": TinyModel(layers=2, experts=6, experts_per_token=3, hidden_dim=64),
}
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "fsdp": ("dense", {"fsdp": 2}, "layers.1.attention.wo"),
    "tp": ("dense", {"tp": 2}, "layers.0.feed_forward.w1"),
    "pp": ("dense", {"pp": 2}, "layers.1.ffn_norm"),
    "experts-tp": ("experts", {"tp": 2}, "layers.1.moe.routed_experts.inner_experts"),
    "experts-fsdp-ep": ("experts", {"fsdp": 2, "ep": 2}, "layers.0.moe.routed_experts"),
}
"""Models, ranks, and an operation that the last rank computes wrongly."""
OLDER = ("tp", "pp", "experts-fsdp-ep")
"""The layouts whose policy that sampled a batch is two steps older than the one that is trained."""
REPLAYED = "experts-fsdp-ep"
"""The layout in which tokens go to experts that were recorded."""


def break_module(model: Any, operation: str) -> Callable[[], None]:
    """Let this module's output be a little too large; what is returned repairs it."""
    module = model.get_submodule(operation)
    plain = module.forward

    def broken(*given: Any, **named: Any) -> Any:
        outputs = plain(*given, **named)
        return tuple(one * 1.02 for one in outputs) if isinstance(outputs, tuple) else outputs * 1.02

    module.forward = broken
    return lambda: setattr(module, "forward", plain)


def as_sampled(one: TrainEngine, choices: tuple[int, int, int] | None) -> PackedRows:
    """A batch whose sampler gave every token the log-prob that this one rank gives it."""
    packed = pack(documents(8, choices=choices), rows=ROWS, row_length=200)
    packed.rows["sampler_logprobs"] = one.logprobs(packed.rows)
    return packed


def said(engine: TrainEngine, batch: PackedRows) -> str:
    """The error of a step."""
    try:
        engine.train_step(batch, PolicyObjective(LossSettings()))
    except ParityError as error:
        return str(error)
    return "nothing differs"


def in_each_process(rank: int, models: Path, out: Path) -> None:
    join_process_group(threads=1, ranks=2)
    for name, (model, degrees, operation) in BROKEN.items():
        optimizer = OptimizerSettings(lr=1e-2)
        settings = TrainerSettings(optimizer=optimizer, microbatch_rows=1, **degrees)
        settings_of_model = ModelSettings(path=str(models / model), dtype="bfloat16", numerics="bitwise")
        engine = TrainEngine(settings_of_model, settings, earlier_policies=2)
        one = TrainEngine(settings_of_model, TrainerSettings(microbatch_rows=1), trains=False)
        packed = as_sampled(one, CHOICES if name == REPLAYED else None)
        share = PackedRows(
            rows=packed.rows[engine.dp_rank :: settings.fsdp],
            batch_trained_tokens=packed.batch_trained_tokens,
            batch_sequences=packed.batch_sequences,
        )
        if name == REPLAYED:
            assert EXPERT_CHOICES in share.rows.keys()  # noqa: SIM118 - a TensorDict iterates over its rows
        found = {"tokens": str(packed.batch_trained_tokens)}
        repair: Callable[[], None] = lambda: None  # noqa: E731
        if rank == 1:
            repair = break_module(engine._model, operation)
        found["broken"] = said(engine, share)
        if name in OLDER:
            repair()
            found["sound"] = [said(engine, share) for _ in range(2)]
            assert engine.policy_version == 2
            if rank == 1:
                break_module(engine._model, operation)
            found["older"] = said(engine, share)
        torch.save(found, out / f"{name}.{rank}")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what each rank said."""
    folder = tmp_path_factory.mktemp("out")
    for name, size in SIZES.items():
        write_tiny_model(folder / name, size)
    in_ranks(in_each_process, 2, (folder, folder))
    return folder


def of_both(out: Path, layout: str, case: str) -> Any:
    """The error of both ranks, which is the same."""
    one, other = (torch.load(out / f"{layout}.{rank}")[case] for rank in range(2))
    assert one == other
    return one


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", BROKEN)
def test_both_ranks_name_the_token_of_an_operation_that_one_computes_wrongly(out: Path, layout: str):
    found = of_both(out, layout, "broken")
    assert f" of {of_both(out, layout, 'tokens')} tokens of policy version 0. " in found
    assert "the trainer's log-prob is" in found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", OLDER)
def test_both_ranks_compare_tokens_of_older_versions_with_these(out: Path, layout: str):  # train-9
    assert of_both(out, layout, "sound") == ["nothing differs"] * 2
    found = of_both(out, layout, "older")
    assert "of policy version 0" in found

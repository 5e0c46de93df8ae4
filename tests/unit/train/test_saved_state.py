"""A checkpoint's state: training continues from it bit for bit, on any mesh, and it is written beside the training."""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.run.rendezvous import in_ranks
from goaly.train.model_engine import ModelEngine
from goaly.train.rank_thread import join_process_group
from goaly.train.saved_state import StagedState, _LoadPlanner, _LocalTensor, _SavePlanner, load_state
from goaly.train.settings import CriticSettings, OptimizerSettings, ScheduleSettings, TrainerSettings
from goaly.train.train_engine import TrainEngine
from goaly.train.value_head import train_values
from goaly.trajectory import PackedRows
from goaly.weights.dtensor_layout import shards_of
from goaly.weights.layout import region
from tests.unit.train.batches import critic_engine, documents, pack

SETTINGS = TrainerSettings(
    optimizer=OptimizerSettings(lr=1e-2, weight_decay=0.1),
    schedule=ScheduleSettings(warmup_steps=3, decay="cosine", total_steps=8),
    microbatch_rows=1,
)
LAYOUTS = {"pp": {"pp": 2}, "fsdp": {"fsdp": 2}, "tp": {"tp": 2}}
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), TinyModel(layers=2))


def policy(folder: Path, settings: TrainerSettings = SETTINGS) -> TrainEngine:
    return TrainEngine(ModelSettings(path=str(folder)), settings)


CRITIC = CriticSettings(optimizer=SETTINGS.optimizer, schedule=SETTINGS.schedule)


def critic(folder: Path) -> ModelEngine:
    return critic_engine(ModelSettings(path=str(folder)), CRITIC, SETTINGS)


def batch(engine: ModelEngine, number: int) -> PackedRows:
    """This rank's share of a batch."""
    packed = pack(documents(8, seed=number), rows=4, row_length=160)
    return dataclasses.replace(packed, rows=packed.rows[engine.dp_rank :: engine.dp_ranks])


def step(engine: ModelEngine) -> dict[str, float]:
    """Train on the batch whose turn it is."""
    packed = batch(engine, engine.steps_done)
    if not isinstance(engine, TrainEngine):
        packed.rows["returns"] = packed.rows["advantages"]
        packed.rows["values"] = engine.column(packed.rows)
        return train_values(engine, packed, CRITIC)
    return engine.train_step(packed, PolicyObjective(LossSettings(kl_coef=0.05)))


def whole(engine: ModelEngine) -> State:
    """A copy of this stage's state, gathered from its ranks."""
    from torch.distributed.tensor import DTensor

    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in engine.state_dict().items()
    }


def of_stages(states: list[State]) -> State:
    """The state of a whole model, of ranks that have different stages or the same one."""
    return {name: tensor for state in states for name, tensor in state.items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def saved(engine: ModelEngine, folder: Path) -> Path:
    staged = StagedState(engine)
    staged.stage()
    staged.write(folder)
    return folder


@pytest.mark.parametrize("make", [policy, critic])
def test_a_loaded_state_continues_bit_for_bit_and_holds_nothing_of_later_steps(make: Any, folder: Path, tmp_path: Path):
    made = make(folder)
    for _ in range(2):
        step(made)
    staged = StagedState(made)
    assert staged.stage() == 2
    expected = [step(made), step(made)]
    staged.write(tmp_path / "state")
    resumed = make(folder)
    load_state(resumed, tmp_path / "state")
    assert resumed.steps_done == 2
    assert [step(resumed), step(resumed)] == expected
    assert resumed.digest() == made.digest()
    assert same(resumed.state_dict(), made.state_dict())


def test_staging_before_the_first_step_changes_nothing(folder: Path, tmp_path: Path):
    made, untouched = policy(folder), policy(folder)
    saved(made, tmp_path / "state")
    resumed = policy(folder)
    load_state(resumed, tmp_path / "state")
    assert step(made) == step(untouched) == step(resumed)
    assert same(made.state_dict(), untouched.state_dict())
    assert same(resumed.state_dict(), untouched.state_dict())


def test_the_memory_of_a_staged_state_is_allocated_once(folder: Path, tmp_path: Path):
    made = policy(folder)
    staged = StagedState(made)
    staged.stage()
    places = {name: held.local.data_ptr() for name, held in staged._copies.items()}
    step(made)
    assert staged.stage() == 1
    assert {name: held.local.data_ptr() for name, held in staged._copies.items()} == places
    staged.write(tmp_path / "state")
    resumed = policy(folder)
    load_state(resumed, tmp_path / "state")
    assert same(resumed.state_dict(), made.state_dict())


def test_rates_schedule_and_decays_are_the_engines_own_and_the_moments_the_checkpoints(folder: Path, tmp_path: Path):
    made = policy(folder)
    for _ in range(4):
        step(made)
    path = saved(made, tmp_path / "state")
    adamw = OptimizerSettings(lr=3e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2)
    changed = dataclasses.replace(SETTINGS, optimizer=adamw, schedule=ScheduleSettings(warmup_steps=8))
    resumed, expected = policy(folder, changed), policy(folder, changed)
    load_state(resumed, path)
    assert same(resumed.state_dict(), made.state_dict())
    for name, tensor in expected.state_dict().items():
        tensor.copy_(made.state_dict()[name])
    for _ in range(4):
        expected._optimizer._schedulers.step()
    expected.steps_done = 4
    assert step(resumed)["lr"] == pytest.approx(3e-3 * 5 / 8)
    step(expected)
    assert same(resumed.state_dict(), expected.state_dict())
    assert resumed.digest() == expected.digest()
    step(made)
    assert resumed.digest() != made.digest()


def test_a_schedule_that_has_ended_stays_at_its_end(folder: Path, tmp_path: Path):
    short = dataclasses.replace(SETTINGS, schedule=ScheduleSettings(decay="linear", total_steps=2, min_lr_factor=0.5))
    made = policy(folder, short)
    for _ in range(3):
        step(made)
    resumed = policy(folder, short)
    load_state(resumed, saved(made, tmp_path / "state"))
    assert step(resumed) == step(made)
    longer = policy(folder, dataclasses.replace(short, schedule=dataclasses.replace(short.schedule, total_steps=10)))
    load_state(longer, tmp_path / "state")
    assert step(longer)["lr"] > 0.75e-2


def test_the_state_of_another_model_is_refused(folder: Path, tmp_path: Path):  # train-5
    path = saved(policy(folder), tmp_path / "state")
    for size, problem in (
        (TinyModel(layers=3), r"state: the checkpoint has no .*layers\.2"),
        (TinyModel(layers=1), r"state: the checkpoint also has .*layers\.1"),
        (TinyModel(layers=2, hidden_dim=128), r"is torch.float32 \(256, 96\) in the checkpoint and .* \(128, 96\)"),
    ):
        other = policy(write_tiny_model(tmp_path / f"{size.layers}.{size.hidden_dim}", size))
        before = other.digest()
        with pytest.raises(ValueError, match=problem):
            load_state(other, path)
        assert other.digest() == before
    with pytest.raises(FileNotFoundError, match=r"nowhere/\.metadata"):
        load_state(policy(folder), tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata.tmp"])
def test_a_full_disk_is_an_error_that_names_the_file_and_the_next_write_works(folder: Path, tmp_path: Path, name: str):
    staged = StagedState(policy(folder))
    staged.stage()
    full = tmp_path / "full"
    full.mkdir()
    (full / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=name) as caught:
        staged.write(full)
    assert caught.value.errno == ENOSPC
    staged.stage()
    staged.write(tmp_path / "state")
    load_state(policy(folder), tmp_path / "state")


PLACEMENTS = {
    "fsdp over tp": (_StridedShard(0, split_factor=2), Shard(0)),  # uneven: DTensor's own rectangles would be wrong
    "strided": (Shard(0), _StridedShard(0, split_factor=2)),  # several rectangles on a rank
    "both dims": (Shard(0), Shard(1)),
    "replicated": (Replicate(), Replicate()),
}


def shares(tensor: torch.Tensor, placements: tuple[Any, ...]) -> list[_LocalTensor]:
    """What each of 3 * 2 ranks holds of a matrix."""
    found = []
    for coordinate in itertools.product(range(3), range(2)):
        layout = shards_of("w", tensor.dtype, tuple(tensor.shape), (3, 2), coordinate, placements)
        size = [max((one.start[dim] + one.shape[dim] for one in layout), default=0) for dim in range(2)]
        found.append(_LocalTensor(layout, torch.zeros(size)))
        for one in layout:
            found[-1].part(MetadataIndex("w", one.offset)).copy_(region(tensor, one.offset, one.shape))
    return found


@pytest.mark.parametrize("after", PLACEMENTS)
@pytest.mark.parametrize("before", PLACEMENTS)
@pytest.mark.parametrize("size", [(7, 5), (12, 8)])
def test_a_tensor_loads_from_any_placement_into_any_other(  # train-5
    before: str, after: str, size: tuple[int, int], tmp_path: Path
):
    tensor = torch.randn(size)
    ranks = [(held, _SavePlanner(), dcp.FileSystemWriter(tmp_path)) for held in shares(tensor, PLACEMENTS[before])]
    plans = []
    for rank, (held, planner, files) in enumerate(ranks):
        planner.set_up_planner({"w": held}, is_coordinator=rank == 0)
        files.set_up_storage_writer(rank == 0, rank=rank)
        plans.append(files.prepare_local_plan(planner.create_local_plan()))
    _, coordinator, first = ranks[0]
    plans, metadata = coordinator.create_global_plan(plans)
    written = [
        files.write_data(planner.finish_plan(plan), planner).wait()
        for plan, (_, planner, files) in zip(first.prepare_global_plan(plans), ranks, strict=True)
    ]
    first.finish(metadata, written)
    for expected in shares(tensor, PLACEMENTS[after]):
        held = _LocalTensor(expected.layout, torch.zeros_like(expected.local))
        dcp.load({"w": held}, checkpoint_id=tmp_path, planner=_LoadPlanner({"w"}), no_dist=True)
        assert torch.equal(held.local, expected.local)


def in_each_process(rank: int, folder: Path, out: Path) -> None:
    join_process_group(threads=1, ranks=2)
    for name, degrees in LAYOUTS.items():
        settings = dataclasses.replace(SETTINGS, **degrees)
        made, resumed = policy(folder, settings), policy(folder, settings)
        for _ in range(2):
            step(made)
        found: dict[str, Any] = {"digest": made.digest(), "state": whole(made)}
        staged = StagedState(made)
        staged.stage()
        with ThreadPoolExecutor() as pool:  # both threads use process groups at once
            writing = pool.submit(staged.write, out / name)
            ends = [step(made), step(made)]
            writing.result()
        load_state(resumed, out / name)
        found["loaded"] = resumed.digest(), same(whole(resumed), found["state"])
        found["continued"] = [step(resumed), step(resumed)] == ends and same(whole(resumed), whole(made))
        found["digests"] = made.digest(), resumed.digest()
        load_state(resumed, out / "one")
        found["from one"] = resumed.digest(), whole(resumed)
        torch.save(found, out / f"{name}.{rank}")
    load_state(resumed, out / "fsdp")  # by the ranks of tensor parallelism
    torch.save((resumed.digest(), whole(resumed)), out / f"crossed.{rank}")
    staged = StagedState(resumed)
    staged.stage()
    staged._version += rank
    try:
        staged.write(out / "mixed")
    except AssertionError as error:
        (out / f"mixed.{rank}").write_text(str(error))
    full = out / "full"
    if rank == 0:
        full.mkdir()
        (full / "__1_0.distcp").symlink_to("/dev/full")
    torch.distributed.barrier()
    staged.stage()
    try:
        staged.write(full)
    except OSError as error:
        (out / f"full.{rank}").write_text(f"{error.errno} {error.filename}")


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelEngine, Path]:
    """An engine of one rank after two steps, saved as `one`, and the folder with what two ranks found."""
    out = tmp_path_factory.mktemp("out")
    one = policy(folder)
    for _ in range(2):
        step(one)
    saved(one, out / "one")
    in_ranks(in_each_process, 2, (folder, out))
    return one, out


def found_by(out: Path, name: str) -> list[Any]:
    return [torch.load(out / f"{name}.{rank}", weights_only=False) for rank in range(2)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_continue_bit_for_bit_from_what_was_written_while_they_trained(
    results: tuple[ModelEngine, Path], layout: str
):
    for found in found_by(results[1], layout):
        assert found["loaded"] == (found["digest"], True)
        assert found["continued"]
        assert found["digests"][0] == found["digests"][1] != found["digest"]
    assert len({found["digest"] for found in found_by(results[1], layout)}) == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_and_its_digest_are_the_same_on_one_rank_and_on_two(  # train-5, weights-7
    results: tuple[ModelEngine, Path], folder: Path, layout: str
):
    one, out = results
    ranks = found_by(out, layout)
    assert {found["from one"][0] for found in ranks} == {one.digest()}
    assert same(of_stages([found["from one"][1] for found in ranks]), whole(one))
    loaded = policy(folder)
    load_state(loaded, out / layout)
    assert loaded.digest() == ranks[0]["digest"]
    assert same(loaded.state_dict(), of_stages([found["state"] for found in ranks]))
    assert loaded.steps_done == 2
    step(loaded)


@pytest.mark.timeout(240)
def test_a_state_of_fsdp_loads_into_tensor_parallelism(results: tuple[ModelEngine, Path]):  # train-5
    expected = found_by(results[1], "fsdp")[0]
    for digest, state in found_by(results[1], "crossed"):
        assert digest == expected["digest"]
        assert same(state, expected["state"])


@pytest.mark.timeout(240)
def test_ranks_that_staged_different_versions_write_nothing(results: tuple[ModelEngine, Path]):
    for rank in range(2):
        assert "different versions: [2, 3]" in (results[1] / f"mixed.{rank}").read_text()
    assert not (results[1] / "mixed").exists()


@pytest.mark.timeout(240)
def test_every_rank_gets_the_error_of_the_one_whose_disk_is_full(results: tuple[ModelEngine, Path]):
    for rank in range(2):
        assert (results[1] / f"full.{rank}").read_text() == f"{ENOSPC} {results[1] / 'full' / '__1_0.distcp'}"


def test_a_state_can_be_loaded_as_that_of_a_later_step_with_the_learning_rate_of_that_step(
    folder: Path, tmp_path: Path
):
    made = policy(folder)
    rates = [step(made)["lr"]]
    earlier = whole(made)
    state = saved(made, tmp_path / "state")
    rates += [step(made)["lr"] for _ in range(3)]
    load_state(made, state, steps_done=3)
    found = whole(made)
    assert int(found.pop("steps_done")) == 3
    assert int(earlier.pop("steps_done")) == 1
    assert same(found, earlier)
    assert step(made)["lr"] == rates[3] != rates[1]

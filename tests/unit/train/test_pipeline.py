"""Four processes over gloo that have the layers of a model one after another do what one process does."""

import dataclasses
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from random_model import native_tensors, write_random_deepseek, write_random_gpt_oss
from safetensors.torch import load_file

from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.run.rendezvous import lasting_port
from goaly.train.pipeline import Pipeline, schedule, stage_of
from goaly.train.settings import TrainerSettings
from goaly.train.train_engine import TrainEngine
from tests.unit.train.batches import pack
from tests.unit.train.test_parallel import (
    ALONE,
    CHECKPOINTED,
    LATENT,
    ROWS,
    SETTINGS,
    SINKS,
    assert_same_replay,
    assert_same_step,
    batch_documents,
    in_parts,
    judged,
    model_of,
    replayed,
    rewritten,
    settings_of,
    trained,
    write_model,
)

PROCESSES = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": {"pp": 4},  # with fewer microbatches than stages
    "pp-tp": {"pp": 2, "tp": 2},
    "experts-pp-fsdp-ep": {"pp": 2, "fsdp": 2, "ep": 2, "activation_checkpointing": "full"},
    "lora-experts-pp-cp": {"pp": 2, "cp": 2, "activation_checkpointing": "selective", "microbatch_rows": 1},
    "bitwise-pp-fsdp": {"pp": 2, "fsdp": 2},
    "latent-pp-fsdp-ep": {"pp": 2, "fsdp": 2, "ep": 2},  # the first stage has no experts
    "sinks-pp-fsdp": {"pp": 2, "fsdp": 2},
}
LAYERS = {"pp": 5, "sinks-pp-fsdp": 2}
"""Where it is not 3."""
FURTHER = "experts-pp-fsdp-ep"
"""The layout in which engines also do everything else."""


def write_a_model(folder: Path) -> None:
    layout = folder.name
    if "latent" in layout:
        write_random_deepseek(folder, **LATENT)
    elif "sinks" in layout:
        write_random_gpt_oss(folder, **SINKS | {"num_hidden_layers": LAYERS[layout]})
    else:
        write_model(folder, layers=LAYERS.get(layout, 3))


def refused(folder: Path, settings: TrainerSettings) -> list[tuple[str, bool]]:
    """What a rank says of a loss and of a gradient that are not finite on the last stage alone, and whether the
    parameters are as they were."""
    engine = TrainEngine(model_of(folder), settings)
    before, found = engine.digest(), []
    batch = pack(batch_documents(), rows=ROWS, row_length=160)
    objective, rows = PolicyObjective(LossSettings()), batch.rows[engine.dp_rank :: settings.fsdp]
    broken = rows.clone()
    broken["advantages"][0, 10] = float("nan")
    last = [parameter for name, parameter in engine._model.named_parameters() if name.startswith("norm.")]
    for given, poisoned in ((broken, []), (rows, last)):
        try:
            engine.forward_backward(given.split(settings.microbatch_rows), objective, batch.batch_trained_tokens)
            for parameter in poisoned:
                parameter.grad.mul_(float("inf"))
            engine.optimizer_step()
        except FloatingPointError as error:
            has_none = all(one.grad is None or not one.grad.any() for one in engine._model.parameters())
            found.append((str(error), has_none and engine.digest() == before))
    return found


def biased(folder: Path, settings: TrainerSettings) -> dict[str, torch.Tensor]:
    """The biases that choose this stage's experts, after a step that moved them."""
    engine = TrainEngine(model_of(folder), dataclasses.replace(settings, expert_balance=0.0, expert_bias_rate=0.01))
    batch = pack(batch_documents(), rows=ROWS, row_length=160)
    batch.rows["sampler_versions"].fill_(-1)  # no policy of this engine sampled them
    share = dataclasses.replace(batch, rows=batch.rows[engine.dp_rank :: settings.fsdp])
    engine.train_step(share, PolicyObjective(LossSettings()))
    return {name: one.clone() for name, one in engine.named_tensors().items() if name.endswith("expert_bias_E")}


def in_each_process(rank: int, port: int, models: Path, out: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    for name, changed in LAYOUTS.items():
        settings = settings_of(name, SETTINGS, **changed)
        found = trained(models / name, settings)
        engine = found.pop("engine")
        found |= {"leads": engine.leads, "digest": engine.digest()}
        engine.save_hf(out / f"{name}.hf")
        if name == FURTHER:
            found["parts"] = in_parts(models / name, settings)
            found["replayed"] = replayed(models / name, settings, layers=3)
            found["rewritten"] = rewritten(models / name, settings)
            found["refused"] = refused(models / name, settings)
            found["judged"] = judged(models / name, settings)
        if "latent" in name:
            found["biased"] = biased(models / name, settings)
        torch.save(found, out / f"{name}.{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models, and of what four processes gave for each layout."""
    folder = tmp_path_factory.mktemp("out")
    for layout in LAYOUTS:
        write_a_model(folder / layout)
    arguments = (lasting_port(), folder, folder)
    torch.multiprocessing.start_processes(in_each_process, arguments, nprocs=PROCESSES, start_method="forkserver")
    return folder


def found_by_ranks(out: Path, layout: str) -> list[dict[str, Any]]:
    return [torch.load(out / f"{layout}.{rank}", weights_only=False) for rank in range(PROCESSES)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_have_the_gradient_metrics_and_step_of_one_rank(out: Path, layout: str):  # train-1
    alone, degrees = trained(out / layout, settings_of(layout, ALONE)), LAYOUTS[layout]
    ranks, of_stage = found_by_ranks(out, layout), PROCESSES // degrees["pp"]
    names = set()
    for rank, found in enumerate(ranks):
        mine = {name.replace(CHECKPOINTED, "") for name in found["gradients"]}
        assert mine != alone["gradients"].keys()
        names |= mine
        expected = {
            "gradients": {name: alone["gradients"][name] for name in mine},
            "parameters": {name: alone["parameters"][name] for name in found["parameters"]},
        }
        assert_same_step(found, alone | expected, degrees)
        rows = alone["logprobs"][found["dp_rank"] :: degrees.get("fsdp", 1)]
        assert torch.equal(found["logprobs"], rows) or "bitwise" not in layout
        row, alike = rank % of_stage, degrees.get("cp", 1) * degrees.get("tp", 1)
        assert (found["dp_rank"], found["leads"]) == (row // alike, rank < of_stage and row % alike == 0)
    assert names == alone["gradients"].keys()
    assert len({found["digest"] for found in ranks}) == 1  # weights-7


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_folder_has_the_layers_of_all_stages(out: Path, layout: str):
    from goaly.models.definition import model_spec

    if "lora" in layout:
        names = load_file(out / f"{layout}.hf" / "adapter_model.safetensors")
        assert {name.split(".")[4] for name in names} == {"0", "1", "2"}
        return
    parameters = {name: one for found in found_by_ranks(out, layout) for name, one in found["parameters"].items()}
    saved = native_tensors(model_spec(out / f"{layout}.hf"), out / f"{layout}.hf")
    assert saved.keys() == parameters.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in parameters.items())


@pytest.mark.timeout(240)
def test_stages_take_the_steps_of_one_rank_on_a_batch_in_parts_and_replay_choices_of_experts(out: Path):  # train-3
    folder, ranks = out / FURTHER, found_by_ranks(out, FURTHER)
    steps, expected = in_parts(folder, ALONE), replayed(folder, ALONE, layers=3)
    for found in ranks:
        assert found["parts"] == pytest.approx(steps, rel=1e-3, abs=1e-5)
        assert_same_replay(found["replayed"], expected, LAYOUTS[FURTHER])


@pytest.mark.timeout(240)
def test_a_stage_computes_with_what_was_written_since_its_last_forward_pass(out: Path):
    alone = rewritten(out / FURTHER, ALONE)
    for found in found_by_ranks(out, FURTHER):
        for when in ("before", "after"):
            rows = alone[when][found["dp_rank"] :: 2]
            torch.testing.assert_close(found["rewritten"][when], rows, atol=1e-5, rtol=1e-4)


@pytest.mark.timeout(240)
def test_stages_have_the_values_and_the_steps_of_one_critic(out: Path):
    alone = judged(out / FURTHER, ALONE)
    assert alone["values"].abs().max() > 0.1
    for found in found_by_ranks(out, FURTHER):
        assert found["judged"]["metrics"] == pytest.approx(alone["metrics"], rel=1e-3, abs=1e-5)
        values = alone["values"][found["dp_rank"] :: 2]
        torch.testing.assert_close(found["judged"]["values"], values, atol=2e-3, rtol=1e-2)


@pytest.mark.timeout(240)
def test_a_stage_moves_the_biases_of_its_own_experts(out: Path):
    (layout,) = (name for name in LAYOUTS if "latent" in name)
    alone = biased(out / layout, ALONE)
    first, *_, last = found_by_ranks(out, layout)
    assert not first["biased"]  # its layer has no experts
    assert last["biased"].keys() == alone.keys()
    for name, bias_E in alone.items():
        torch.testing.assert_close(last["biased"][name], bias_E)


@pytest.mark.timeout(240)
def test_what_is_not_finite_on_the_last_stage_stops_all_ranks_and_changes_no_parameter(out: Path):  # train-2
    for found in found_by_ranks(out, FURTHER):
        (loss, kept), (norm, also_kept) = found["refused"]
        assert loss == "train loss is nan at policy version 0"
        assert norm.startswith("train grad_norm is ")
        assert kept
        assert also_kept


@pytest.mark.parametrize("layers", range(1, 12))
def test_stages_have_each_layer_once_and_about_as_many(layers: int):
    for count in range(1, layers + 1):
        stages = [stage_of(layers, count, number) for number in range(count)]
        assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
        weights = [len(stage.layers) + stage.is_first + stage.is_last for stage in stages]
        assert min(len(stage.layers) for stage in stages) >= 1
        assert max(weights) - min(weights) <= (1 if layers + 2 >= 2 * count else 2)


SHAPES = [(stages, microbatches) for stages in range(1, 6) for microbatches in range(1, 8)]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_a_stage_makes_each_pass_once_and_holds_no_more_microbatches_than_stages_follow(stages: int, microbatches: int):
    for number in range(stages):
        order = schedule(stage_of(stages, stages, number), microbatches, trains=True)
        held: set[int] = set()
        for microbatch, is_backward in order:
            held ^= {microbatch}
            assert is_backward == (microbatch not in held)
            assert len(held) <= stages - number
        assert len(order) == 2 * microbatches
        assert not held


class Recording(Pipeline):
    """A stage that notes what it would send and receive at once."""

    def _exchange(self, sent: Any, batch: Any = None, source: int = -1) -> torch.Tensor | None:
        receives = batch is not None and 0 <= source < self.stage.count
        self.noted.append((None if sent is None else sent.to, source if receives else None))
        return torch.ones(1) if receives else None


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_no_stage_waits_for_ever_even_if_a_message_is_sent_only_once_it_is_received(
    stages: int, microbatches: int, trains: bool
):  # train-8
    exchanges: list[deque[list[tuple[str, int]]]] = []
    for number in range(stages):
        pipeline = Recording(stage_of(stages, stages, number))
        pipeline.noted = []
        pipeline.run(
            [SimpleNamespace()] * microbatches,
            lambda rows: rows,
            lambda batch, hidden: torch.ones(1, requires_grad=trains) * (1 if hidden is None else hidden),
            (lambda batch: None) if trains else None,
        )
        exchanges.append(
            deque(
                [(kind, peer) for kind, peer in zip(("send", "receive"), noted, strict=True) if peer is not None]
                for noted in pipeline.noted
                if noted != (None, None)
            )
        )

    def matches() -> Iterator[tuple[int, int]]:
        for rank, waiting in enumerate(exchanges):
            for kind, peer in waiting[0] if waiting else ():
                if kind == "send" and exchanges[peer] and ("receive", rank) in exchanges[peer][0]:
                    yield rank, peer

    messages = (stages - 1) * microbatches * (2 if trains else 1)
    for _ in range(messages):
        sender, receiver = next(matches())
        exchanges[sender][0].remove(("send", receiver))
        exchanges[receiver][0].remove(("receive", sender))
        for rank in (sender, receiver):
            if not exchanges[rank][0]:
                exchanges[rank].popleft()
    assert not any(exchanges)

"""Two processes over gloo, sharded by FSDP2, tensor and context parallelism, do what one process does."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from random_model import angles, native_tensors, write_random_deepseek, write_random_gpt_oss
from safetensors.torch import load_file

from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings, Rejection
from goaly.models.settings import LoraSettings, ModelSettings
from goaly.run.rendezvous import lasting_port
from goaly.train.parallel_model import _layout
from goaly.train.rank import join_process_group
from goaly.train.settings import AXES, CriticSettings, OptimizerSettings, TrainerSettings
from goaly.train.train_engine import TrainEngine
from goaly.train.value_head import train_values
from goaly.trajectory import Minibatch, PackedRows
from tests.unit.train.batches import critic_engine, documents, pack

REJECTION = Rejection(measure="ratio", level="token", low=0.3, high=3.0, policy="current")
OBJECTIVES = {
    "token_mean": LossSettings(kl_coef=0.05, entropy_coef=0.1),
    "sequence_mean": LossSettings(name="gspo", options={"clip_low": 0.5, "clip_high": 0.5}),
    "sequence_sum": LossSettings(name="dr_grpo", constant_length=60, proximal="trainer", importance="sequence"),
    "kept": LossSettings(aggregation="sequence_mean", rejections=(REJECTION,), denominator="after"),
    "lopsided": LossSettings(rejections=(REJECTION,), denominator="after"),
}
SETTINGS = TrainerSettings(optimizer=OptimizerSettings(lr=1e-2), logprob_chunk=50, expert_balance=0.5)
LAYOUTS = {
    "fsdp": {"fsdp": 2},
    "tp": {"tp": 2},
    "bitwise-fsdp": {"fsdp": 2},
    "bitwise-tp": {"tp": 2},
    "experts-fsdp": {"fsdp": 2},
    "experts-tp": {"tp": 2},
    "experts-fsdp-ep": {"fsdp": 2, "ep": 2},
    "experts-tp-ep": {"tp": 2, "ep": 2},
    "bitwise-experts-tp": {"tp": 2},
    "bitwise-experts-tp-ep": {"tp": 2, "ep": 2},
    "latent-tp": {"tp": 2},
    "latent-fsdp-ep": {"fsdp": 2, "ep": 2},
    "shared-experts-tp": {"tp": 2},
    "shared-experts-fsdp-ep": {"fsdp": 2, "ep": 2},
    "sinks-tp": {"tp": 2},
    "sinks-fsdp-ep": {"fsdp": 2, "ep": 2},
    "lora-fsdp": {"fsdp": 2},
    "lora-tp": {"tp": 2},
    "lora-experts-fsdp": {"fsdp": 2},
    "lora-experts-tp": {"tp": 2},
    "lora-experts-fsdp-ep": {"fsdp": 2, "ep": 2},
    "lora-experts-tp-ep": {"tp": 2, "ep": 2},
    "cp": {"cp": 2},
    "experts-cp": {"cp": 2},
    "latent-cp": {"cp": 2},
    "sinks-cp": {"cp": 2},
}
WHOLE = [name for name in LAYOUTS if "lora" not in name]
"""The layouts in which all parameters are trained."""
IN_PARTS = ("fsdp", "tp", "experts-fsdp-ep", "lora-fsdp", "cp")
REPLAYED = ("experts-tp", "experts-fsdp-ep", "experts-tp-ep", "shared-experts-tp", "lora-experts-tp-ep", "experts-cp")
REWRITTEN = ("fsdp", "tp", "bitwise-tp", "experts-fsdp-ep", "latent-tp", "cp")
JUDGED = ("fsdp", "tp", "bitwise-fsdp", "experts-tp-ep", "latent-fsdp-ep", "cp")
"""Layouts of one more property each, which have every way in which it depends on the layout."""
EVERY_LOSS = ("fsdp", "experts-fsdp-ep", "cp")
"""The layouts with every objective; what a loss adds up over ranks depends on nothing else of the layout."""
FIRST_LANE = ("fsdp", "tp", "experts-fsdp-ep", "experts-cp")
"""The layouts of `make test`; test_pipeline.py has a pipeline."""
LORA = LoraSettings(rank=8, alpha=24.0, seed=3)
EXPERTS = {"experts": 4, "hidden_dim": 64}
LATENT = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_hidden_layers": 2, "moe_intermediate_size": 32}
SINKS = {"num_local_experts": 4, "num_hidden_layers": 1, "intermediate_size": 32}
SMALL_STEPS = OptimizerSettings(lr=1e-3)
BIAS_RATE = 0.01
CHECKPOINTED = "_checkpoint_wrapped_module."
"""In the names of parameters in blocks that are computed again."""
ROWS = 4
LENGTHS = (30, 20, 50, 40, 30, 30, 40, 30, 30, 20)
"""Rows of two lengths."""
batch_documents = partial(documents, len(LENGTHS), lengths=LENGTHS)
ALONE = dataclasses.replace(SETTINGS, microbatch_rows=ROWS)
"""What one process computes with: all rows at once."""
MODELS = "models"


def model_of(folder: Path) -> ModelSettings:
    """The model of a layout."""
    return ModelSettings(path=str(folder), numerics="bitwise" if "bitwise" in folder.name else "fast")


def settings_of(layout: str, settings: TrainerSettings, **divided: Any) -> TrainerSettings:
    """The settings of a layout on so many ranks, each of which has its rows in two microbatches unless it says how many
    rows these have."""
    if divided:
        divided = {"microbatch_rows": ROWS // 2 // divided.get("fsdp", 1), **divided}
    rate = BIAS_RATE if "shared" in layout else 0.0
    return dataclasses.replace(settings, lora=LORA if "lora" in layout else None, expert_bias_rate=rate, **divided)


def write_model(folder: Path, *, layers: int = 1) -> Path:
    """A model as the name of the folder says."""
    from goaly.models.tiny_model import TinyModel, write_tiny_model

    size: dict[str, Any] = EXPERTS if "experts" in folder.name else {"tied": folder.name == "tp"}
    if "few-experts" in folder.name:
        size = size | {"experts": 2}
    return write_tiny_model(folder, TinyModel(layers=layers, shared_experts=int("shared" in folder.name), **size))


def change_adapters(engine: TrainEngine) -> None:
    """Let the adapters change what the model computes, in the same way on any ranks."""
    from goaly.models.lora import B, draw_adapters

    draw_adapters(engine.named_tensors(), seed=7, which=B)


def trained(folder: Path, settings: TrainerSettings) -> dict[str, Any]:
    """What a step on the batch gives on this rank: whole gradients, metrics, log-probs, whole new parameters."""
    from torch.distributed.tensor import DTensor

    engine = TrainEngine(model_of(folder), settings)
    change_adapters(engine)
    batch = pack(batch_documents(), rows=ROWS, row_length=160)
    rows = batch.rows[engine.dp_rank :: settings.fsdp]

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    if engine._experts is not None:
        engine._experts.loads_LE.copy_(torch.linspace(0.1, 0.4, engine._experts.loads_LE.shape[-1]))
        engine._experts.balance(settings.expert_balance, batch.batch_trained_tokens)
    logprobs = engine.logprobs(rows)
    metrics, gradients = {}, {}
    for name, loss in OBJECTIVES.items():
        if folder.name not in EVERY_LOSS and name not in ("token_mean", "lopsided"):
            continue
        if name == "lopsided":  # all that is trained lies on the first of two data-parallel ranks
            batch.rows["trained"][1::2] = False
            rows = batch.rows[engine.dp_rank :: settings.fsdp]
        engine._optimizer._optimizers.zero_grad()
        objective = PolicyObjective(loss)
        found = engine.forward_backward(
            rows.split(settings.microbatch_rows), objective, objective.denominator(batch)
        ).metrics
        metrics |= {f"{name}/{metric}": value for metric, value in found.items()}
        gradients |= {
            f"{name}/{key}": whole(parameter.grad)
            for key, parameter in engine._model.named_parameters()
            if parameter.grad is not None
        }
    metrics |= engine.optimizer_step()
    if engine._experts is not None:
        metrics |= engine._experts.take_loads(settings.expert_bias_rate)
    parameters = {name: whole(tensor) for name, tensor in engine.named_tensors().items()}
    kept = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    for tensor in engine.named_tensors().values():
        tensor.zero_()
    engine.load_state_dict(kept)
    same = all(torch.equal(whole(t), parameters[name]) for name, t in engine.named_tensors().items())
    return {
        "metrics": metrics,
        "logprobs": logprobs,
        "gradients": gradients,
        "parameters": parameters,
        "resumed": same,
        "dp_rank": engine.dp_rank,
        "angles": angles(engine._model),
        "engine": engine,
    }


def assert_same_step(found: dict[str, Any], alone: dict[str, Any], degrees: dict[str, int]) -> None:
    """What a rank has found is what one process found alone."""
    gradients = {name.replace(CHECKPOINTED, ""): one for name, one in found["gradients"].items()}
    assert gradients.keys() == alone["gradients"].keys()
    for name, one in alone["gradients"].items():
        tolerance = 5e-6 * one.abs().max().item() + 1e-8
        torch.testing.assert_close(gradients[name], one, atol=tolerance, rtol=2e-3, msg=name)
    assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-6)
    rows = alone["logprobs"][found["dp_rank"] :: degrees.get("fsdp", 1)]
    torch.testing.assert_close(found["logprobs"], rows, atol=1e-5, rtol=1e-4)
    biases = [name for name in alone["parameters"] if name.endswith("expert_bias_E")]
    assert all(torch.equal(found["parameters"][name], alone["parameters"][name]) for name in biases)
    assert found["resumed"]


def assert_same_replay(found: dict[str, Any], alone: dict[str, Any], degrees: dict[str, int]) -> None:
    """What a rank has found with the sampler's choices is what one process found alone."""
    assert 0.3 < alone["metrics"]["experts/rerouted"] < 0.7
    assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-3, abs=1e-5)
    for which in ("frozen", "after"):
        rows = alone[which][found["dp_rank"] :: degrees.get("fsdp", 1)]
        torch.testing.assert_close(found[which], rows, atol=1e-4, rtol=1e-4)


def in_two(batch: PackedRows, rank: int, ranks: int) -> PackedRows:
    """A rank's share of the batch in two parts, each two of its four rows."""
    counts = [int(rows["trained"].sum()) for rows in batch.rows.split(2)]
    minibatches = tuple(Minibatch(rows=2 // ranks, trained_tokens=count, sequences=5) for count in counts)
    return dataclasses.replace(batch, rows=batch.rows[rank::ranks], minibatches=minibatches)


def in_parts(folder: Path, settings: TrainerSettings) -> dict[str, Any]:
    """What a batch in two parts gives on this rank, of a loss whose second step looks back to before the first."""
    engine = TrainEngine(model_of(folder), dataclasses.replace(settings, optimizer=SMALL_STEPS))
    batch = pack(batch_documents(), rows=ROWS, row_length=160)
    batch.rows["sampler_versions"].fill_(-1)  # no policy of this engine sampled them
    share = in_two(batch, engine.dp_rank, settings.fsdp)
    return engine.train_step(share, PolicyObjective(LossSettings(name="ppo", proximal="trainer")))


def rewritten(folder: Path, settings: TrainerSettings) -> dict[str, Any]:
    """Log-probs of this rank's rows under frozen parameters, and again after somebody has halved them in place."""
    from torch.distributed.tensor import DTensor

    engine = TrainEngine(model_of(folder), settings, trains=False)
    rows = pack(batch_documents(), rows=ROWS, row_length=160).rows[engine.dp_rank :: settings.fsdp]
    held = [t._local_tensor if isinstance(t, DTensor) else t for t in engine.named_tensors().values()]
    before = engine.logprobs(rows)
    torch._foreach_mul_(list({tensor.data_ptr(): tensor for tensor in held}.values()), 0.5)
    return {"before": before, "after": engine.logprobs(rows), "dp_rank": engine.dp_rank}


def replayed(folder: Path, settings: TrainerSettings, layers: int = 1) -> dict[str, Any]:
    """What a step and a frozen model give on this rank if the sampler has chosen the experts."""
    model = model_of(folder)
    engine = TrainEngine(model, dataclasses.replace(settings, optimizer=SMALL_STEPS))
    batch = pack(batch_documents(choices=(layers, EXPERTS["experts"], 2)), rows=ROWS, row_length=160)
    batch.rows["sampler_versions"].fill_(-1)  # no policy of this engine sampled them
    share = dataclasses.replace(batch, rows=batch.rows[engine.dp_rank :: settings.fsdp])
    frozen = TrainEngine(model, settings, trains=False).logprobs(share.rows)
    metrics = engine.train_step(share, PolicyObjective(LossSettings(name="ppo")))
    return {"metrics": metrics, "frozen": frozen, "after": engine.logprobs(share.rows), "dp_rank": engine.dp_rank}


def judged(folder: Path, settings: TrainerSettings) -> dict[str, Any]:
    """What a critic's two passes over a batch in two parts give on this rank: metrics, and values after them."""
    degrees = {axis: getattr(settings, axis) for axis in (*AXES, "ep")}
    critic = CriticSettings(optimizer=OptimizerSettings(lr=1e-2), epochs=2, value_clip=1.0, **degrees)
    engine = critic_engine(model_of(folder), critic, settings)
    share = in_two(pack(batch_documents(), rows=ROWS, row_length=160), engine.dp_rank, settings.fsdp)
    share.rows["returns"] = share.rows["advantages"]  # any numbers
    share.rows["values"] = engine.column(share.rows)
    metrics = train_values(engine, share, critic)
    return {"metrics": metrics, "values": engine.column(share.rows), "dp_rank": engine.dp_rank}


def in_each_process(rank: int, port: int, models: Path, out: Path, names: list[str]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for name in names:
        settings = settings_of(name, SETTINGS, **LAYOUTS[name])
        result = trained(models / name, settings)
        result.pop("engine").save_hf(out / f"{name}.hf")
        torch.save(result, out / f"{name}.{rank}")
        for property, of, layouts in (
            ("critic", judged, JUDGED),
            ("rewritten", rewritten, REWRITTEN),
            ("parts", in_parts, IN_PARTS),
            ("replayed", replayed, REPLAYED),
        ):
            if name in layouts:
                torch.save(of(models / name, settings), out / f"{name}.{property}.{rank}")
    dist.destroy_process_group()


def in_lanes(names: Iterable[str]) -> list[Any]:
    """The layouts as parameters, each in its lane."""
    return [name if name in FIRST_LANE else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, dict[str, Any]], Path]:
    """What one process gives for the model of each layout of this lane, and the folder with what two gave."""
    mine = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {item.callspec.params.get("layout") for item in mine}
    names = [name for name in LAYOUTS if name in wanted]
    out = tmp_path_factory.mktemp("out")
    models = out / MODELS
    for layout in names:
        if "latent" in layout:
            write_random_deepseek(models / layout, **LATENT)
        elif "sinks" in layout:
            write_random_gpt_oss(models / layout, **SINKS)
        else:
            write_model(models / layout)
    port = lasting_port()
    arguments = (port, models, out, names)
    torch.multiprocessing.start_processes(in_each_process, arguments, nprocs=2, start_method="forkserver")
    return {name: trained(models / name, settings_of(name, ALONE)) for name in names}, out


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", in_lanes(LAYOUTS))
def test_two_ranks_have_the_gradient_metrics_and_step_of_one(
    results: tuple[dict[str, dict[str, Any]], Path], layout: str
):
    alone, out = results[0][layout], results[1]
    for rank in range(2):
        found = torch.load(out / f"{layout}.{rank}", weights_only=False)
        assert_same_step(found, alone, LAYOUTS[layout])
        rows = alone["logprobs"][found["dp_rank"] :: LAYOUTS[layout].get("fsdp", 1)]
        assert torch.equal(found["logprobs"], rows) or "bitwise" not in layout  # BW-2, BE-2
        assert found["angles"] == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", in_lanes(IN_PARTS))
def test_two_ranks_have_the_steps_of_one_on_a_batch_in_parts(
    results: tuple[dict[str, dict[str, Any]], Path], layout: str
):
    _, out = results
    alone = in_parts(out / MODELS / layout, settings_of(layout, ALONE))
    for rank in range(2):
        found = torch.load(out / f"{layout}.parts.{rank}", weights_only=False)
        assert found == pytest.approx(alone, rel=1e-3, abs=1e-5)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", in_lanes(REPLAYED))
def test_two_ranks_replay_choices_of_experts_as_one_does(  # train-3
    results: tuple[dict[str, dict[str, Any]], Path], layout: str
):
    _, out = results
    alone = replayed(out / MODELS / layout, settings_of(layout, ALONE))
    for rank in range(2):
        found = torch.load(out / f"{layout}.replayed.{rank}", weights_only=False)
        assert_same_replay(found, alone, LAYOUTS[layout])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", in_lanes(REWRITTEN))
def test_a_sharded_model_computes_with_what_was_written_since_its_last_forward_pass(
    results: tuple[dict[str, dict[str, Any]], Path], layout: str
):
    _, out = results
    alone = rewritten(out / MODELS / layout, ALONE)
    assert (alone["after"] - alone["before"]).abs().max() > 0.1
    for rank in range(2):
        found = torch.load(out / f"{layout}.rewritten.{rank}", weights_only=False)
        for when in ("before", "after"):
            rows = alone[when][found["dp_rank"] :: LAYOUTS[layout].get("fsdp", 1)]
            torch.testing.assert_close(found[when], rows, atol=1e-5, rtol=1e-4)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", in_lanes(JUDGED))
def test_two_ranks_have_the_values_and_the_steps_of_one_critic(
    results: tuple[dict[str, dict[str, Any]], Path], layout: str
):
    _, out = results
    alone = judged(out / MODELS / layout, ALONE)
    assert alone["values"].abs().max() > 0.1
    for rank in range(2):
        found = torch.load(out / f"{layout}.critic.{rank}", weights_only=False)
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-3, abs=1e-5)
        values = alone["values"][found["dp_rank"] :: LAYOUTS[layout].get("fsdp", 1)]
        torch.testing.assert_close(found["values"], values, atol=2e-3, rtol=1e-2)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", in_lanes(WHOLE))
def test_sharded_ranks_save_the_folder_of_their_whole_parameters(
    results: tuple[dict[str, dict[str, Any]], Path], layout: str
):
    from goaly.models.definition import model_spec

    _, out = results
    found = torch.load(out / f"{layout}.0", weights_only=False)["parameters"]
    saved = native_tensors(model_spec(out / f"{layout}.hf"), out / f"{layout}.hf")
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in found.items())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", in_lanes(name for name in LAYOUTS if "lora" in name))
def test_sharded_ranks_save_the_adapters_that_one_saves(  # LR-3, AF-1
    results: tuple[dict[str, dict[str, Any]], Path], layout: str, tmp_path: Path
):
    alone, out = results[0][layout], results[1]
    alone["engine"].save_hf(tmp_path / "alone")
    one, two = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "alone", out / f"{layout}.hf")
    )
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("gpu", "backends"), [(True, "cpu:gloo,cuda:nccl"), (False, "gloo")])
def test_a_rank_that_is_alone_communicates_by_the_same_backends_as_one_among_others(gpu, backends, monkeypatch):
    class Met(Exception):
        pass

    def meet(backend: str, **_: Any) -> None:
        raise Met(backend)

    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("goaly.models.device.use_local_device", lambda: None)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    for meeting in (lambda: _layout(SETTINGS), lambda: join_process_group(threads=1, ranks=2)):
        with pytest.raises(Met, match=f"^{backends}$"):
            meeting()

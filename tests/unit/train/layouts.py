"""Layouts of ranks, the results of engines on them, and their comparison with those of one process.

A test file has some layouts, whose ranks are processes over gloo that all start at once.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import angles, native_tensors, write_random_deepseek, write_random_gpt_oss
from safetensors.torch import load_file

from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings, Rejection
from goaly.models.settings import LoraSettings, ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.run.rendezvous import in_ranks
from goaly.train.rank_thread import join_process_group
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
EVERY_LOSS = ("fsdp", "experts-fsdp-ep", "cp")
"""The layouts with every objective; what a loss adds up over ranks depends on nothing else of the layout."""
LORA = LoraSettings(rank=8, alpha=24.0, seed=3)
EXPERTS = {"experts": 4, "hidden_dim": 64}
LATENT = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_hidden_layers": 2, "moe_intermediate_size": 32}
SINKS = {"num_local_experts": 4, "intermediate_size": 32}
SMALL_STEPS = OptimizerSettings(lr=1e-3)
BIAS_RATE = 0.01
CHECKPOINTED = "_checkpoint_wrapped_module."
"""In the names of parameters in blocks that are computed again."""
ROWS = 4
LENGTHS = (30, 20, 50, 40, 30, 30, 40, 30, 30, 20)
"""Rows of two lengths."""
batch_documents = partial(documents, len(LENGTHS), lengths=LENGTHS)


@dataclass(frozen=True)
class Layout:
    """How ranks divide the model of a name's family, and what is compared beside `step` and `folder`."""

    degrees: dict[str, Any]
    further: tuple[str, ...] = ()
    layers: int = 1

    @property
    def ranks(self) -> int:
        return prod(self.degrees.get(axis, 1) for axis in AXES)

    @property
    def properties(self) -> tuple[str, ...]:
        return ("step", "folder", *self.further)


def settings_of(name: str, degrees: Mapping[str, Any] | None = None) -> TrainerSettings:
    """The settings of a layout's ranks, each of which has its rows in two microbatches unless the layout says how many
    rows these have. Without `degrees`, those of one process, which has all rows at once."""
    divided = {"microbatch_rows": ROWS}
    if degrees is not None:
        divided = {"microbatch_rows": ROWS // 2 // degrees.get("fsdp", 1), **degrees}
    rate = BIAS_RATE if "shared" in name else 0.0
    return dataclasses.replace(SETTINGS, lora=LORA if "lora" in name else None, expert_bias_rate=rate, **divided)


def model_of(folder: Path) -> ModelSettings:
    """The model of a layout."""
    return ModelSettings(path=str(folder), numerics="bitwise" if "bitwise" in folder.name else "fast")


def write_model(folder: Path, layers: int) -> None:
    """A model as the name of the folder says."""
    name = folder.name
    if "latent" in name:
        write_random_deepseek(folder, **LATENT)
    elif "sinks" in name:
        write_random_gpt_oss(folder, **SINKS, num_hidden_layers=layers)
    else:
        size: dict[str, Any] = {"tied": name == "tp"}
        if "experts" in name:
            size = EXPERTS | ({"experts": 2} if "few-experts" in name else {})
        write_tiny_model(folder, TinyModel(layers=layers, shared_experts=int("shared" in name), **size))


def change_adapters(engine: TrainEngine) -> None:
    """Let the adapters change what the model computes, in the same way on any ranks."""
    from goaly.models.lora import B, draw_adapters

    draw_adapters(engine.named_tensors(), seed=7, which=B)


def trained(folder: Path, settings: TrainerSettings) -> dict[str, Any]:
    """The result of a step on this rank: whole gradients, metrics, log-probs, whole new parameters."""
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


def in_two(batch: PackedRows, rank: int, ranks: int) -> PackedRows:
    """A rank's share of the batch in two parts, each two of its four rows."""
    counts = [int(rows["trained"].sum()) for rows in batch.rows.split(2)]
    minibatches = tuple(Minibatch(rows=2 // ranks, trained_tokens=count, sequences=5) for count in counts)
    return dataclasses.replace(batch, rows=batch.rows[rank::ranks], minibatches=minibatches)


def in_parts(folder: Path, settings: TrainerSettings) -> dict[str, Any]:
    """The metrics of a batch in two parts, with a loss whose second step looks back to before the first."""
    engine = TrainEngine(model_of(folder), dataclasses.replace(settings, optimizer=SMALL_STEPS))
    batch = pack(batch_documents(), rows=ROWS, row_length=160)
    batch.rows["sampler_versions"].fill_(-1)  # no policy of this engine sampled them
    share = in_two(batch, engine.dp_rank, settings.fsdp)
    return {"metrics": engine.train_step(share, PolicyObjective(LossSettings(name="ppo", proximal="trainer")))}


def rewritten(folder: Path, settings: TrainerSettings) -> dict[str, Any]:
    """Log-probs of this rank's rows under frozen parameters, and again after somebody has halved them in place."""
    from torch.distributed.tensor import DTensor

    engine = TrainEngine(model_of(folder), settings, trains=False)
    rows = pack(batch_documents(), rows=ROWS, row_length=160).rows[engine.dp_rank :: settings.fsdp]
    held = [t._local_tensor if isinstance(t, DTensor) else t for t in engine.named_tensors().values()]
    before = engine.logprobs(rows)
    torch._foreach_mul_(list({tensor.data_ptr(): tensor for tensor in held}.values()), 0.5)
    return {"before": before, "after": engine.logprobs(rows), "dp_rank": engine.dp_rank}


def replayed(folder: Path, settings: TrainerSettings) -> dict[str, Any]:
    """The results of a step and of a frozen model on this rank if the sampler has chosen the experts."""
    model = model_of(folder)
    engine = TrainEngine(model, dataclasses.replace(settings, optimizer=SMALL_STEPS))
    layers = len(engine._parallel.spec.model.layers)
    batch = pack(batch_documents(choices=(layers, EXPERTS["experts"], 2)), rows=ROWS, row_length=160)
    batch.rows["sampler_versions"].fill_(-1)  # no policy of this engine sampled them
    share = dataclasses.replace(batch, rows=batch.rows[engine.dp_rank :: settings.fsdp])
    frozen = TrainEngine(model, settings, trains=False).logprobs(share.rows)
    metrics = engine.train_step(share, PolicyObjective(LossSettings(name="ppo")))
    return {"metrics": metrics, "frozen": frozen, "after": engine.logprobs(share.rows), "dp_rank": engine.dp_rank}


def judged(folder: Path, settings: TrainerSettings) -> dict[str, Any]:
    """A critic's metrics of two passes over a batch in two parts, and its values after them."""
    degrees = {axis: getattr(settings, axis) for axis in (*AXES, "ep")}
    critic = CriticSettings(optimizer=OptimizerSettings(lr=1e-2), epochs=2, value_clip=1.0, **degrees)
    engine = critic_engine(model_of(folder), critic, settings)
    share = in_two(pack(batch_documents(), rows=ROWS, row_length=160), engine.dp_rank, settings.fsdp)
    share.rows["returns"] = share.rows["advantages"]  # any numbers
    share.rows["values"] = engine.column(share.rows)
    metrics = train_values(engine, share, critic)
    return {"metrics": metrics, "values": engine.column(share.rows), "dp_rank": engine.dp_rank}


def refused(folder: Path, settings: TrainerSettings) -> list[tuple[str, bool]]:
    """The errors of a loss and of a gradient that are not finite on the last stage alone, and whether the
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


COMPUTED: dict[str, Callable[[Path, TrainerSettings], Any]] = {
    "step": trained,
    "parts": in_parts,
    "replayed": replayed,
    "rewritten": rewritten,
    "critic": judged,
    "refused": refused,
    "biases": biased,
}


def in_each_process(rank: int, out: Path, layouts: Mapping[str, Layout]) -> None:
    join_process_group(threads=1, ranks=next(iter(layouts.values())).ranks)
    for name, layout in layouts.items():
        found, settings = {}, settings_of(name, layout.degrees)
        for what in layout.properties:
            if what != "folder":
                found[what] = COMPUTED[what](out / name, settings)
        engine = found["step"].pop("engine")
        found["step"] |= {"leads": engine.leads, "digest": engine.digest()}
        engine.save_hf(out / f"{name}.hf")
        torch.save(found, out / f"{name}.{rank}")


class Compared:
    """The results of ranks beside those of one process."""

    def __init__(self, out: Path, layouts: Mapping[str, Layout]):
        self._out, self._layouts = out, layouts
        self._alone: dict[str, Any] = {}
        for name, layout in layouts.items():
            write_model(out / name, layout.layers)
        in_ranks(in_each_process, next(iter(layouts.values())).ranks, (out, layouts))

    def check(self, name: str, what: str) -> None:
        """Fail unless the ranks have found what one process finds."""
        layout, folder = self._layouts[name], self._out / name
        ranks = [torch.load(self._out / f"{name}.{rank}", weights_only=False) for rank in range(layout.ranks)]
        if what in ("step", "folder"):
            if name not in self._alone:
                self._alone[name] = trained(folder, settings_of(name))
            found, alone = [one["step"] for one in ranks], self._alone[name]
            if what == "step":
                assert_same_step(name, layout, found, alone)
            else:
                assert_same_folder(self._out / f"{name}.hf", found, alone["engine"] if "lora" in name else None)
            return
        alone = None if what == "refused" else COMPUTED[what](folder, settings_of(name))
        for rank, one in enumerate(ranks):
            CHECKS[what](one[what], alone, layout, rank)


def mine(rows: Any, found: dict[str, Any], layout: Layout) -> Any:
    """The rows of the rank that has found this."""
    return rows[found["dp_rank"] :: layout.degrees.get("fsdp", 1)]


def assert_same_step(name: str, layout: Layout, ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Each rank has the part of the step that one process made."""
    degrees, names = layout.degrees, set()
    for rank, found in enumerate(ranks):
        gradients = {key.replace(CHECKPOINTED, ""): one for key, one in found["gradients"].items()}
        names |= gradients.keys()
        assert (gradients.keys() == alone["gradients"].keys()) == (degrees.get("pp", 1) == 1)
        for key, one in gradients.items():
            expected = alone["gradients"][key]
            tolerance = 5e-6 * expected.abs().max().item() + 1e-8
            torch.testing.assert_close(one, expected, atol=tolerance, rtol=2e-3, msg=key)
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-6)
        rows = mine(alone["logprobs"], found, layout)
        torch.testing.assert_close(found["logprobs"], rows, atol=1e-5, rtol=1e-4)
        assert torch.equal(found["logprobs"], rows) or "bitwise" not in name  # numerics-2, numerics-8
        biases = [key for key in found["parameters"] if key.endswith("expert_bias_E")]
        assert all(torch.equal(found["parameters"][key], alone["parameters"][key]) for key in biases)
        assert found["resumed"]
        assert found["angles"] == 1
        of_stage = layout.ranks // degrees.get("pp", 1)
        row, alike = rank % of_stage, degrees.get("cp", 1) * degrees.get("tp", 1)
        assert (found["dp_rank"], found["leads"]) == (row // alike, rank < of_stage and row % alike == 0)
    assert names == alone["gradients"].keys()
    assert len({found["digest"] for found in ranks}) == 1  # weights-7


def assert_same_folder(saved: Path, ranks: list[dict[str, Any]], alone: TrainEngine | None) -> None:
    """The saved folder has the whole parameters of all ranks, or the adapters that one process saves `alone`."""
    from goaly.models.definition import model_spec

    if alone is not None:
        alone.save_hf(saved.with_suffix(".alone"))
        two, one = (load_file(at / "adapter_model.safetensors") for at in (saved, saved.with_suffix(".alone")))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, atol=2e-3, rtol=0)
        return
    parameters = {name: one for found in ranks for name, one in found["parameters"].items()}
    tensors = native_tensors(model_spec(saved), saved)
    assert tensors.keys() == parameters.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in parameters.items())


def assert_same_parts(found: Any, alone: Any, layout: Layout, rank: int) -> None:
    assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-3, abs=1e-5)


def assert_same_replay(found: Any, alone: Any, layout: Layout, rank: int) -> None:  # train-3
    assert 0.3 < alone["metrics"]["experts/rerouted"] < 0.7
    assert_same_parts(found, alone, layout, rank)
    for which in ("frozen", "after"):
        torch.testing.assert_close(found[which], mine(alone[which], found, layout), atol=1e-4, rtol=1e-4)


def assert_same_rewritten(found: Any, alone: Any, layout: Layout, rank: int) -> None:
    assert (alone["after"] - alone["before"]).abs().max() > 0.1
    for when in ("before", "after"):
        torch.testing.assert_close(found[when], mine(alone[when], found, layout), atol=1e-5, rtol=1e-4)


def assert_same_critic(found: Any, alone: Any, layout: Layout, rank: int) -> None:
    assert alone["values"].abs().max() > 0.1
    assert_same_parts(found, alone, layout, rank)
    torch.testing.assert_close(found["values"], mine(alone["values"], found, layout), atol=2e-3, rtol=1e-2)


def assert_refused(found: Any, alone: Any, layout: Layout, rank: int) -> None:  # train-2
    (loss, kept), (norm, also_kept) = found
    assert loss == "train loss is nan at policy version 0"
    assert norm.startswith("train grad_norm is ")
    assert kept
    assert also_kept


def assert_own_biases(found: Any, alone: Any, layout: Layout, rank: int) -> None:
    """The first stage's layer has no experts."""
    assert found.keys() == (alone.keys() if rank >= layout.ranks // layout.degrees["pp"] else set())
    for name, bias_E in found.items():
        torch.testing.assert_close(bias_E, alone[name])


CHECKS: dict[str, Callable[[Any, Any, Layout, int], None]] = {
    "parts": assert_same_parts,
    "replayed": assert_same_replay,
    "rewritten": assert_same_rewritten,
    "critic": assert_same_critic,
    "refused": assert_refused,
    "biases": assert_own_biases,
}


def cases(layouts: Mapping[str, Layout], first_lane: tuple[str, ...] = ()) -> Iterator[Any]:
    """Each property of each layout as parameters, in its lane."""
    for name, layout in layouts.items():
        for what in layout.properties:
            yield pytest.param(name, what, marks=[] if name in first_lane else pytest.mark.slow)


def compared(request: pytest.FixtureRequest, out: Path, layouts: Mapping[str, Layout]) -> Compared:
    """The layouts that this session tests, with the results of their ranks."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {item.callspec.params.get("name") for item in items}
    return Compared(out, {name: layout for name, layout in layouts.items() if name in wanted})

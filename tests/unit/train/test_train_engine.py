"""The engine on one rank: its gradient doesn't depend on how a batch is cut, and it refuses what isn't finite."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from goaly.base.config.check import check
from goaly.base.errors import ConfigError
from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings, Rejection
from goaly.models.settings import ModelSettings
from goaly.train.settings import (
    OptimizerSettings,
    ReferenceSettings,
    ScheduleSettings,
    TrainerSettings,
)
from goaly.train.train_engine import TrainEngine
from tests.unit.train.batches import LOSS, SETTINGS, VOCABULARY, documents, gradients, pack

REJECTION = Rejection(measure="ratio", level="token", low=0.3, high=3.0, policy="current")
"""Leaves out about half of the tokens that `documents` makes."""
OBJECTIVES = {
    "token_mean": LOSS,
    "sequence_mean": LossSettings(name="gspo", options={"clip_low": 0.5, "clip_high": 0.5}),
    "sequence_sum": LossSettings(name="dr_grpo", constant_length=60, proximal="interpolated", importance="sequence"),
    "tokens_kept": LossSettings(rejections=(REJECTION,), denominator="after"),
    "gspo_kept": LossSettings(
        name="gspo", options={"clip_low": 0.5, "clip_high": 0.5}, rejections=(REJECTION,), entropy_coef=0.1
    ),
    "sequences_kept": LossSettings(aggregation="sequence_mean", rejections=(REJECTION,), denominator="after"),
}


@pytest.fixture
def engine(tiny_model_folder: Path):
    return lambda settings=SETTINGS, **more: TrainEngine(ModelSettings(path=str(tiny_model_folder)), settings, **more)


def assert_same_gradients(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        assert one.abs().max() > 0
        torch.testing.assert_close(others[name], one, atol=2e-6 * one.abs().max().item() + 1e-8, rtol=2e-4, msg=name)


@pytest.mark.parametrize("loss", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_gradient_is_the_same_for_any_packing_and_any_microbatches(engine, loss: LossSettings):
    made, sequences = engine(), documents(8)
    one = gradients(made, pack(sequences, rows=4, row_length=128), 4, loss)  # train-1
    assert_same_gradients(one, gradients(made, pack(sequences, rows=4, row_length=128), 1, loss))
    assert_same_gradients(one, gradients(made, pack(sequences[::-1], rows=2, row_length=300), 1, loss))


def test_counting_what_is_kept_divides_gradient_and_loss_by_that_count(engine):
    made, packed = engine(), pack(documents(8), rows=4, row_length=128)
    found = {}
    for count in ("before", "after"):
        objective = PolicyObjective(LossSettings(rejections=(REJECTION,), denominator=count))
        metrics = made.forward_backward(packed.rows.split(1), objective, objective.denominator(packed)).metrics
        found[count] = metrics, {name: parameter.grad for name, parameter in made._model.named_parameters()}
        made._optimizer._optimizers.zero_grad()
    (before, gradients_before), (after, gradients_after) = found["before"], found["after"]
    kept = 1 - before["rejected"]
    assert 0.2 < kept < 0.8
    assert after["loss"] == pytest.approx(before["loss"] / kept, rel=1e-5)
    assert_same_gradients({name: gradient / kept for name, gradient in gradients_before.items()}, gradients_after)


def test_leaving_out_truncated_answers_is_as_if_they_were_not_there_where_they_do_not_count(engine):
    made, packed = engine(), pack(documents(6), rows=3, row_length=128)
    packed.rows["truncated"] = packed.rows["trained"] & (torch.arange(3) == 1)[:, None]
    masked = gradients(made, packed, 1, dataclasses.replace(LOSS, mask_truncated=True, denominator="after"))
    packed.rows["trained"][1] = False
    rest = dataclasses.replace(packed, batch_trained_tokens=int(packed.rows["trained"].sum()))
    assert_same_gradients(gradients(made, rest, 1), masked)


def test_a_batch_of_which_nothing_is_kept_has_no_gradient(engine):
    made, packed = engine(), pack(documents(4), rows=2, row_length=128)
    nothing = Rejection(measure="ratio", level="token", high=1e-30, policy="current")
    metrics = made.train_step(packed, PolicyObjective(LossSettings(rejections=(nothing,), denominator="after")))
    assert (metrics["rejected"], metrics["loss"], metrics["grad_norm"]) == (1, 0, 0)


@pytest.mark.parametrize("how", ["selective", "full"])
def test_activation_checkpointing_changes_no_gradient(engine, how: str):
    packed = pack(documents(4), rows=2, row_length=128)
    plain = gradients(engine(), packed, 2)
    wrapped = gradients(engine(dataclasses.replace(SETTINGS, activation_checkpointing=how)), packed, 2)
    names = {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in wrapped.items()}
    assert_same_gradients(plain, names)


def test_the_metrics_are_means_over_the_trained_tokens(engine):
    made, packed = engine(), pack(documents(6), rows=3, row_length=128)
    rows = packed.rows
    logprobs = made.logprobs(rows)
    trained = rows["trained"]
    ratio = (logprobs - rows["sampler_logprobs"])[trained].exp()
    metrics = made.train_step(packed, PolicyObjective(LOSS))
    assert metrics["ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-4)
    assert metrics["effective_sample_size"] == pytest.approx(
        (ratio.mean() ** 2 / ratio.square().mean()).item(), rel=1e-4
    )
    assert (logprobs[~trained] == 0).all()


def test_the_entropy_is_reported_and_its_bonus_raises_it(engine):
    packed = pack(documents(6), rows=3, row_length=128)
    packed.rows["advantages"].zero_()
    found = {}
    for coefficient in (0.0, 1.0):
        made, objective = engine(), PolicyObjective(LossSettings(name="reinforce", entropy_coef=coefficient))
        found[coefficient] = [made.train_step(packed, objective)["entropy"] for _ in range(4)]
    still, raised = found[0.0], found[1.0]
    assert still == [pytest.approx(still[0])] * 4
    assert 0 < still[0] < math.log(VOCABULARY)
    assert raised[0] == still[0]
    assert raised[0] < raised[-1] <= math.log(VOCABULARY)


def test_the_same_inputs_give_bit_identical_parameters_and_resuming_continues_them(engine):
    settings = dataclasses.replace(SETTINGS, schedule=ScheduleSettings(warmup_steps=2, decay="cosine", total_steps=6))
    batches = [pack(documents(4, seed=seed), rows=2, row_length=128) for seed in range(4)]
    one, other, resumed = engine(settings), engine(settings), engine(settings)
    loss = PolicyObjective(LOSS)
    for batch in batches[:2]:
        one.train_step(batch, loss)
        other.train_step(batch, loss)
    resumed.load_state_dict(other.state_dict())
    for batch in batches[2:]:
        first = one.train_step(batch, loss)
        assert other.train_step(batch, loss) == first == resumed.train_step(batch, loss)
    assert one.policy_version == resumed.policy_version == 4
    for name, tensor in one.named_tensors().items():
        assert torch.equal(tensor, other.named_tensors()[name])
        assert torch.equal(tensor, resumed.named_tensors()[name])


def test_a_value_that_is_not_finite_raises_with_its_name_and_changes_no_parameter(engine):
    made, packed = engine(), pack(documents(4), rows=2, row_length=128)
    before = {name: tensor.clone() for name, tensor in made.named_tensors().items()}
    packed.rows["advantages"][packed.rows["trained"].nonzero(as_tuple=True)] = float("nan")
    with pytest.raises(FloatingPointError, match="train loss is nan at policy version 0"):
        made.train_step(packed, PolicyObjective(LOSS))
    packed.rows["advantages"].fill_(1.0)
    made.forward_backward([packed.rows], PolicyObjective(LOSS), packed.batch_trained_tokens)
    next(made._model.parameters()).grad[0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match="train grad_norm is inf"):
        made.optimizer_step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.named_tensors().items())


def test_gradients_are_clipped_to_the_norm(engine):
    packed = pack(documents(4), rows=2, row_length=128)
    steps = {}
    for limit in (None, 1e-3):
        made = engine(dataclasses.replace(SETTINGS, max_grad_norm=limit))
        made.forward_backward([packed.rows], PolicyObjective(LOSS), packed.batch_trained_tokens)
        norm = made._optimizer.clip()
        clipped = torch.stack([p.grad.norm() for p in made._model.parameters()]).norm().item()
        steps[limit] = norm, clipped
    assert steps[None][0] == steps[1e-3][0] == pytest.approx(steps[None][1], rel=1e-4)
    assert steps[1e-3][1] == pytest.approx(1e-3, rel=1e-3)


def test_the_rate_warms_up_decays_and_stays_at_its_end(engine):
    def rates(schedule: ScheduleSettings, steps: int) -> list[float]:
        made = engine(TrainerSettings(optimizer=OptimizerSettings(lr=1.0), schedule=schedule))._optimizer
        seen = []
        for _ in range(steps):
            seen.append(made.lr)
            made.step()
        return seen

    assert rates(ScheduleSettings(warmup_steps=2), 4) == [0.5, 1, 1, 1]
    linear = ScheduleSettings(warmup_steps=1, decay="linear", total_steps=5, min_lr_factor=0.1)
    assert rates(linear, 8) == pytest.approx([1, 1, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1])
    cosine = ScheduleSettings(decay="cosine", total_steps=4)
    assert rates(cosine, 7) == pytest.approx([1, 0.8535534, 0.5, 0.1464466, 0, 0, 0], abs=1e-7)


def test_what_can_not_work_is_refused_with_its_key(engine):
    with pytest.raises(ConfigError, match=r"trainer.compile=true: needs a GPU"):
        engine(TrainerSettings(compile=True))
    with pytest.raises(ConfigError, match=r"pp=1 \* fsdp=2 \* tp=1 \* cp=1 must be the number of ranks, 1"):
        engine(TrainerSettings(fsdp=2))
    with pytest.raises(ValueError, match="denominator=0"):
        engine().forward_backward([], PolicyObjective(LOSS), 0)
    given = {"tp": 2, "compile": True, "temperature": 0, "schedule": {"decay": "linear"}}
    assert check(TrainerSettings, given, "trainer")[1] == [
        "trainer.temperature=0: must be above 0",
        "trainer.schedule.total_steps: is not set, trainer.schedule.decay=linear needs it",
        "trainer.compile=true: works on one rank, trainer.pp * trainer.fsdp * trainer.tp * trainer.cp is 2",
    ]


def test_log_probs_are_those_of_logits_divided_by_the_temperature(engine):
    rows = pack(documents(4), rows=2, row_length=128).rows
    made = engine(dataclasses.replace(SETTINGS, temperature=2.0))
    head = made._model.lm_head
    halved = engine()
    with torch.no_grad():
        halved._model.lm_head.weight.copy_(head.weight / 2)
    assert torch.equal(made.logprobs(rows), halved.logprobs(rows))  # a power of 2 rounds nothing
    assert not torch.equal(made.logprobs(rows), engine().logprobs(rows))


def test_the_optimizer_is_adamw_with_the_decay_the_decays_of_its_means_and_the_epsilon_that_are_set(engine):
    lr, beta1, beta2, eps, decay = 0.1, 0.5, 0.75, 1e-3, 0.25
    adamw = OptimizerSettings(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay)
    made = engine(TrainerSettings(optimizer=adamw, max_grad_norm=None))
    parameters = list(made._model.parameters())
    expected = [parameter.detach().double() for parameter in parameters]
    means = [torch.zeros_like(parameter) for parameter in expected]
    squares = [torch.zeros_like(parameter) for parameter in expected]
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 4):
        for parameter, value, mean, square in zip(parameters, expected, means, squares, strict=True):
            parameter.grad = 0.01 * torch.randn(parameter.shape, generator=generator)
            mean.mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
            square.mul_(beta2).add_(parameter.grad.double() ** 2, alpha=1 - beta2)
            update = mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + eps)
            value.mul_(1 - lr * decay).sub_(update, alpha=lr)
        made._optimizer.step()
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, atol=1e-6, rtol=1e-5)


def test_a_frozen_model_has_parameters_of_the_compute_type_and_the_log_probs_of_one_that_trains(
    tiny_model_folder: Path,
):
    model = ModelSettings(path=str(tiny_model_folder), dtype="bfloat16")
    rows = pack(documents(4), rows=2, row_length=128).rows
    try:
        frozen = TrainEngine(model, SETTINGS, trains=False)
        assert not torch.distributed.is_initialized()  # one rank that casts nothing needs no FSDP
        trained = TrainEngine(model, SETTINGS)
        assert {tensor.dtype for tensor in frozen.named_tensors().values()} == {torch.bfloat16}
        assert {tensor.dtype for tensor in trained.named_tensors().values()} == {torch.float32}
        assert torch.equal(frozen.logprobs(rows), trained.logprobs(rows))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_offloading_a_reference_is_refused_where_there_is_no_gpu(tiny_model_folder: Path):
    from goaly.train.reference import ReferenceModel

    reference = ReferenceModel(
        ReferenceSettings(offload=True),
        SETTINGS,
        ModelSettings(path=str(tiny_model_folder), dtype="bfloat16"),
        queue=None,
    )
    with pytest.raises(ConfigError, match=r"reference\.offload=true: needs a GPU"):
        reference._make_engine()


def test_a_trainer_publishes_in_the_models_compute_type_unless_another_is_set():
    from goaly.train.trainer import PolicyTrainer
    from goaly.weights.settings import WeightSettings

    def published_in(dtype: str, transfer_dtype: str | None) -> str | None:
        weights = WeightSettings(transfer_dtype=transfer_dtype)
        made = PolicyTrainer(SETTINGS, ModelSettings(dtype=dtype), LOSS, weights, None, queue=None)
        return made._weight_settings.transfer_dtype

    assert published_in("bfloat16", None) == "bfloat16"
    assert published_in("float32", None) == "float32"
    assert published_in("bfloat16", "float32") == "float32"

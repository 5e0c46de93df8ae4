"""Packed batches for the trainer's tests, and their gradients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.train.settings import CriticSettings, OptimizerSettings, TrainerSettings
from goaly.trajectory import EXPERT_CHOICES, PackedRows

if TYPE_CHECKING:
    from goaly.models.settings import ModelSettings
    from goaly.train.model_engine import ModelEngine
    from goaly.train.train_engine import TrainEngine

VOCABULARY = 32
LOSS = LossSettings(kl_coef=0.05)
SETTINGS = TrainerSettings(optimizer=OptimizerSettings(lr=1e-2), logprob_chunk=50)
Document = dict[str, torch.Tensor]


def documents(
    count: int,
    *,
    seed: int = 0,
    longest: int = 60,
    lengths: Sequence[int] = (),
    choices: tuple[int, int, int] | None = None,
) -> list[Document]:
    """Random sequences of these or random lengths: a prompt of 3 tokens, then trained tokens with random columns. With
    `choices`, random ones of experts: these numbers of layers, experts, and experts of a token."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        length = lengths[number] if lengths else int(torch.randint(5, longest, (), generator=generator))
        trained = torch.arange(length) >= 3
        made.append(
            {
                "tokens": torch.randint(0, VOCABULARY, (length,), generator=generator),
                "trained": trained,
                "sampler_logprobs": (-3.4 + 0.3 * torch.randn(length, generator=generator)).clamp(max=0) * trained,
                "sampler_versions": torch.where(trained, 0, -1).int(),
                "rewards": torch.zeros(length),
                "advantages": torch.randn((), generator=generator) * trained.float(),
                "reference_logprobs": (-3.4 + 0.2 * torch.randn(length, generator=generator)) * trained,
            }
        )
        if choices is not None:
            layers, experts, of_token = choices
            order = torch.rand(length, layers, experts, generator=generator).argsort(-1)
            made[-1][EXPERT_CHOICES] = order[..., :of_token].to(torch.uint8)
    return made


def pack(sequences: list[Document], *, rows: int, row_length: int) -> PackedRows:
    """Deal the sequences over rows in turn; the rest of each row is padding."""
    columns: dict[str, list[torch.Tensor]] = {}
    for row in range(rows):
        mine = sequences[row::rows]
        used = sum(len(sequence["tokens"]) for sequence in mine)
        assert used <= row_length
        padding = {key: value.new_zeros(row_length - used, *value.shape[1:]) for key, value in sequences[0].items()}
        for key in sequences[0]:
            columns.setdefault(key, []).append(torch.cat([*(sequence[key] for sequence in mine), padding[key]]))
        positions = [torch.arange(len(sequence["tokens"])) for sequence in mine]
        columns.setdefault("positions", []).append(torch.cat([*positions, torch.arange(row_length - used)]))
    return PackedRows(
        rows=TensorDict({key: torch.stack(value) for key, value in columns.items()}, batch_size=[rows, row_length]),
        batch_trained_tokens=sum(int(sequence["trained"].sum()) for sequence in sequences),
        batch_sequences=len(sequences),
    )


def critic_engine(model: "ModelSettings", critic: CriticSettings, trainer: TrainerSettings) -> "ModelEngine":
    """The engine of a critic, as its actor makes it."""
    from goaly.train.model_engine import ModelEngine
    from goaly.train.value_head import VALUES

    return ModelEngine(model, critic.engine_settings(trainer), VALUES)


def gradients(
    engine: "TrainEngine", packed: PackedRows, microbatch_rows: int, loss: LossSettings = LOSS
) -> dict[str, torch.Tensor]:
    objective = PolicyObjective(loss)
    engine.forward_backward(packed.rows.split(microbatch_rows), objective, objective.denominator(packed))
    found = {name: parameter.grad for name, parameter in engine._model.named_parameters()}
    engine._optimizer._optimizers.zero_grad()
    return found

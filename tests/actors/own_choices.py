"""The experts that the trainer's model chooses itself, and whether an engine has recorded these."""

from pathlib import Path
from typing import Any

import torch

from goaly.generate.request import Sample
from goaly.models.settings import ModelSettings
from goaly.trajectory import TensorDict, TokenColumns, pack_rows


def as_row(sequences: list[TokenColumns]) -> TensorDict:
    """The sequences as one packed row."""
    total = sum(len(sequence["tokens"]) for sequence in sequences)
    return pack_rows(sequences, [tuple(range(len(sequences)))], total, 0)


class OwnChoices:
    """The trainer's model of a folder, in float32."""

    def __init__(self, folder: Path):
        from goaly.train.settings import TrainerSettings
        from goaly.train.train_engine import TrainEngine

        self._engine: Any = TrainEngine(ModelSettings(path=str(folder)), TrainerSettings(), trains=False)

    def of(self, tokens: list[int]) -> torch.Tensor:
        """The experts `[T - 1, layers, K]` that it chooses for all tokens but the last, in order of their numbers."""
        found: list[torch.Tensor] = []
        hooks = [
            layer.router.register_forward_hook(lambda *call: found.append(call[2][1][0]))
            for layer in self._engine._experts.layers
        ]
        self.logprobs({"tokens": torch.tensor(tokens), "trained": torch.arange(len(tokens)) > 0})
        for hook in hooks:
            hook.remove()
        return torch.stack(found, 1)[:-1].sort().values

    def logprobs(self, sequence: TokenColumns) -> torch.Tensor:
        """The log-probs of the sequence's trained tokens."""
        return self._engine.logprobs(as_row([sequence]))

    def change_biases(self) -> None:
        """Let the routers prefer other experts."""
        for layer in self._engine._experts.layers:
            layer.expert_bias_E.copy_(torch.randn(len(layer.expert_bias_E), generator=torch.Generator().manual_seed(1)))

    def assert_recorded(self, prompt: list[int], sample: Sample, first: int = 0, last: int | None = None) -> None:
        """Check that those of the tokens `[first, last)` are recorded."""
        assert sample.choices is not None
        assert sample.choices.dtype == torch.uint8
        own = self.of(prompt + sample.tokens.tolist())
        assert sample.choices.shape == own.shape
        assert torch.equal(sample.choices.long().sort().values[first:last], own[first:last])

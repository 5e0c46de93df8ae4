"""The layers with experts on a rank: the tokens that each expert had, what balances them, and replayed choices.

Every rank knows the loads of all layers, also of those of other stages of a pipeline.

Shape suffixes: L layers with experts of the whole model, E experts of a layer, N and K as in `microbatch.py`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from goaly.train.microbatch import Microbatch
from goaly.train.pipeline import Stage
from goaly.weights.dtensor_layout import local


class ExpertLayers:
    """The layers with experts of one stage of a model that has some."""

    def __init__(self, model: Any, config: Any, stage: Stage, device: torch.device):
        """`config` is torchtitan's of the whole model."""
        self.layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "tokens_per_expert_E")]
        self._counts: list[Tensor] = []
        """Of each layer: choices that were rerouted, all choices, and those that an expert computed."""
        for layer in self.layers:
            dispatcher = layer.routed_experts.token_dispatcher
            counts = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(3)]  # exact for any batch
            layer.rerouted, dispatcher.made, dispatcher.computed = counts
            self._counts += counts
        numbers = [number for number, layer in enumerate(config.layers) if layer.moe is not None]
        first = sum(number < stage.layers.start for number in numbers)
        self._own = slice(first, first + len(self.layers))
        experts = config.layers[numbers[0]].moe.num_experts
        self.loads_LE = torch.zeros(len(numbers), experts, device=device)
        """Each expert's share of its layer's tokens in the last step; zeros before the first."""
        self._replays = False

    def begin(self, batch: Microbatch, *, replays: bool) -> None:
        """Tell the layers about the tokens of the next pass; with `replays` they go to the experts that the sampler
        chose, if these are known (train-3)."""
        trained_1T1 = torch.zeros_like(batch.tokens_1T, dtype=torch.float32)[..., None]
        trained_1T1[:, batch.predicting_P] = 1.0
        choices_1TNK = batch.choices_1TNK if replays else None
        self._replays = choices_1TNK is not None
        for number, layer in enumerate(self.layers, self._own.start):
            layer.trained_BL1 = trained_1T1
            layer.choices_BLK = None if choices_1TNK is None else choices_1TNK[:, :, number]
            layer.replayed_BL1 = None if batch.replayed_1T is None else batch.replayed_1T[..., None]

    def balance(self, weight: float, trained_tokens: int) -> None:
        """Add the gradient of `trainer.expert_balance`, which is `weight`, to the next passes' router scores.

        The shares are those of the batch before, so that they are known in each pass, on any packing and rank.
        """
        if weight:
            layers, experts = self.loads_LE.shape  # without a trained token, `forward_backward` raises
            for layer, share_E in zip(self.layers, self.loads_LE[self._own], strict=True):
                layer.score_gradient_E = share_E * (weight * experts / layers / max(trained_tokens, 1))

    def take_loads(self, bias_rate: float = 0.0) -> dict[str, float]:
        """How evenly the trained tokens since the last call were spread over each layer's experts, on all ranks; which
        share of the choices of all tokens no expert computed; and if the experts were the sampler's choices, how many
        of these the router would have made differently.

        Moves the biases that choose experts by `bias_rate`. Every rank must call it."""
        layers, experts = self.loads_LE.shape
        counted = self.loads_LE.new_zeros(layers, experts + 3, dtype=torch.float64)
        tokens_LE, counts_L3 = counted.split([experts, 3], 1)
        found = [local(layer.tokens_per_expert_E) for layer in self.layers] + self._counts
        if found:
            own = [*tokens_LE[self._own], *(count for row_3 in counts_L3[self._own] for count in row_3)]
            torch._foreach_copy_(own, found)
            torch._foreach_zero_(found)
        if dist.is_initialized():
            dist.all_reduce(counted)
        self.loads_LE.copy_(tokens_LE / tokens_LE.sum(1, keepdim=True).clamp(min=1))
        if bias_rate and self.layers:
            rises_LE = torch.sign(tokens_LE.mean(1, keepdim=True) - tokens_LE).float() * bias_rate
            torch._foreach_add_([local(layer.expert_bias_E) for layer in self.layers], list(rises_LE[self._own]))
        rerouted, made, computed = counts_L3.sum(0).tolist()
        metrics = {
            "experts/load_max": float(self.loads_LE.max()) * experts,
            "experts/unused": float((tokens_LE == 0).sum()),
            "experts/dropped": (made - computed) / max(made, 1),
        }
        if self._replays:
            metrics["experts/rerouted"] = rerouted / max(float(tokens_LE.sum()), 1)
        return metrics

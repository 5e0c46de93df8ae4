"""Mixtures of experts with `model.numerics=bitwise`: a token gets the same bits however ranks divide the experts.

A tensor-parallel rank has a part of every expert's hidden features, an expert-parallel rank has some whole experts, and
a rank that gets its tokens' rows back from other ranks has a row of each expert. All of them add the numbers of
numerics-8 in its order: a rank has either all that one sum needs, or one of two numbers that are added last.

Gradients are those of the ordinary experts.

Shape suffixes: B = 1, L tokens, T the same, D model dim, E experts, e those of this rank, K experts of a token, R rows
routed to experts, grouped by expert, N the rows of all experts, F inputs and G outputs of a product, S slices of the
hidden features that this rank has, H tokens of both halves of the experts.

Invariants
    numerics-7: A token's experts are those with the highest scores, and of equal ones those with the lowest numbers.
        They are in the order of their numbers, and their weights are divided by the sum in this order.
    numerics-8: A token's output is the sum of `SLICES` slices, each the sum of the lower and the upper half of the
        experts. A half is the sum of weight times output in the order of the experts, in float32, rounded to the
        model's type. An expert's output of a slice is that of a network with this slice of its hidden features only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter

from goaly.numerics import SLICES
from goaly.numerics.bitwise_expert_networks import Packed, by_kernel, exactly_packed, networks
from goaly.numerics.bitwise_operations import on_gpu, on_local, softmax
from goaly.numerics.experts import Dispatcher, Experts, OwnExpertsDispatcher
from goaly.numerics.layer_replacement import of_rank


class BitwiseRouter(TokenChoiceTopKRouter):
    """Chooses experts by the softmax of exact logits, in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """torchtitan's."""

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of each token's experts, the experts (numerics-7), and the scores of all."""
        scores_BLE = on_local(softmax, self.gate(x_BLD).float())
        preferred_BLE = scores_BLE if expert_bias_E is None else scores_BLE + expert_bias_E  # of a replayed choice
        experts_BLK = highest(of_rank(preferred_BLE.detach()), self.top_k)
        if isinstance(preferred_BLE, DTensor):
            placed = preferred_BLE.device_mesh, preferred_BLE.placements
            experts_BLK = DTensor.from_local(experts_BLK, *placed, run_check=False)
        weights_BLK = scores_BLE.gather(-1, experts_BLK)
        if self.route_norm:
            total_BL1 = weights_BLK[..., :1]
            for number in range(1, self.top_k):
                total_BL1 = total_BL1 + weights_BLK[..., number : number + 1]
            weights_BLK = weights_BLK / total_BL1
        return weights_BLK, experts_BLK, scores_BLE


def highest(scores_BLE: Tensor, count: int) -> Tensor:
    """The numbers of the highest scores, in order (numerics-7)."""
    best_BLE = scores_BLE.sort(dim=-1, descending=True, stable=True).indices
    return best_BLE[..., :count].sort(dim=-1).values  # choices that are replayed have no other order


class BitwiseExperts(Experts):
    """Gives each row its expert's output of each slice of the hidden features: rows `[R, S * D]`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Experts.Config):
        """The experts'."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._hidden_dim = config.hidden_dim
        self.packed: Packed | None = None
        """Its weights in the kernel's order, once `pack` has been called."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """The slices' outputs of each row, side by side."""
        w1, w2, w3 = self._networks()
        return networks(x_RD, w1, w2, w3, num_tokens_per_expert_E.tolist(), self._slices(), self.packed)

    def pack(self) -> None:
        """Keep the weights in the kernel's order for the passes to come; to be called anew when they change."""
        if not on_gpu(self.w1_EFD):
            w1, w2, w3 = self._networks()
            self.packed = exactly_packed(w1.detach(), w2.detach(), w3.detach(), self._slices())

    def _networks(self) -> tuple[Tensor, Tensor, Tensor]:
        return of_rank(self.w1_EFD), of_rank(self.w2_EDF), of_rank(self.w3_EFD)

    def _slices(self) -> int:
        """The slices of a rank that has these hidden features."""
        return SLICES * of_rank(self.w1_EFD).shape[1] // self._hidden_dim


class BitwiseRoutedExperts(RoutedExperts):
    """Adds a token's experts in the order of numerics-8."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """torchtitan's."""

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        """The weighted sum of each token's experts; a sampler that has all of them need not sort their rows."""
        packed = getattr(self.inner_experts, "packed", None)
        if packed is None or type(self.token_dispatcher) is not BitwiseDispatcher:
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        x_TD, experts_TK = x_BLD.flatten(0, 1), topk_expert_ids_BLK.flatten(0, 1)
        tokens, each = experts_TK.shape
        rows_NG = by_kernel(x_TD.repeat_interleave(each, 0), experts_TK.flatten(), packed)
        weights_TK, is_upper_TK = topk_scores_BLK.flatten(0, 1), experts_TK >= self.token_dispatcher.num_experts // 2
        halves_HK = torch.cat([weights_TK.masked_fill(is_upper_TK, 0.0), weights_TK.masked_fill(~is_upper_TK, 0.0)])
        row_HK = torch.arange(tokens * each).view(tokens, each).repeat(2, 1)
        both_HG = F.embedding_bag(row_HK, rows_NG.float(), mode="sum", per_sample_weights=halves_HK.float())
        lower_TG, upper_TG = both_HG.to(rows_NG.dtype).chunk(2)
        return _whole(lower_TG + upper_TG, x_TD).view(x_BLD.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Where the rows of a layer's experts are added, in the order of numerics-8."""

    row_N: Tensor
    """The rows in the order of halves, tokens and experts."""
    bag_N: Tensor
    """Half and token of each row, as `half * T + token`; the same order as the rows."""
    weight_N: Tensor
    """The weights, in the order of `row_N`."""
    tokens: int

    @classmethod
    def of(cls, token_N: Tensor, weight_N: Tensor, tokens: int, lower: int) -> "Combined":
        """The places of rows that are in the order of the experts, of which `lower` are of the lower half."""
        bag_N = token_N.clone()
        bag_N[lower:] += tokens
        row_N = torch.argsort(bag_N, stable=True)
        return cls(row_N=row_N, bag_N=bag_N, weight_N=weight_N[row_N], tokens=tokens)

    def add(self, rows_NG: Tensor) -> Tensor:
        """Each token's weighted sum of its rows."""
        if torch.is_grad_enabled():
            return _WeightedSum.apply(rows_NG, self.weight_N, self)
        return self.sums(rows_NG)

    def sums(self, rows_NG: Tensor) -> Tensor:
        """The sum, without a gradient."""
        starts = torch.bincount(self.bag_N, minlength=2 * self.tokens).cumsum(0).roll(1)
        starts[0] = 0
        both_SG = F.embedding_bag(
            self.row_N, rows_NG.float(), starts, mode="sum", per_sample_weights=self.weight_N.float()
        )
        lower_TG, upper_TG = both_SG.to(rows_NG.dtype).chunk(2)
        return lower_TG + upper_TG


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NG: Tensor, weight_N: Tensor, combined: Combined) -> Tensor:
        ctx.save_for_backward(rows_NG, weight_N)
        ctx.combined = combined
        return combined.sums(rows_NG)

    @staticmethod
    def backward(ctx: Any, grad_TG: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_NG, weight_N = ctx.saved_tensors
        combined = ctx.combined
        grad_NG = grad_TG[combined.bag_N % combined.tokens].float()
        grad_weight_N = (grad_NG * rows_NG).sum(1)[combined.row_N].to(weight_N.dtype)
        weights_N = torch.empty_like(weight_N).index_copy_(0, combined.row_N, weight_N)
        return grad_NG.mul_(weights_N[:, None]).to(rows_NG.dtype), grad_weight_N, None


class BitwiseDispatcher(Dispatcher):
    """Sends tokens to their experts, and adds what comes back in the order of numerics-8."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dispatcher.Config):
        """torchtitan's."""

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """The rows of this rank's experts, how many each has, and where they belong."""
        rows_RD, own_e, sent = super().dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        lower = int(num_local_tokens_per_expert_E[: self.num_experts // 2].sum())
        token_N, weight_N = sent.token_indices_experts_sorted_N, sent.topk_scores_experts_sorted_N
        return rows_RD, own_e, (sent, Combined.of(token_N, weight_N, len(x_TD), lower))

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """The weighted sum of each token's experts."""
        sent, combined = metadata
        if self.ep_mesh is not None:
            by_rank_RG = self._unpermute(routed_output_RD, routed_output_RD.shape, sent.permuted_indices)
            routed_output_RD = self._combine_token_exchange(
                by_rank_RG, self.ep_mesh.get_group(), sent.input_splits, sent.output_splits
            )
        return _whole(combined.add(routed_output_RD), x_TD)


class BitwiseOwnExpertsDispatcher(OwnExpertsDispatcher):
    """Lets ranks that have all tokens and one half of the experts each add their outputs in the order of numerics-8."""

    @dataclass(kw_only=True, slots=True)
    class Config(OwnExpertsDispatcher.Config):
        """The experts of this rank."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.add: Callable[[Tensor], Tensor] | None = None
        """Adds the ranks' parts of a tensor."""

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """The rows of this rank's experts, how many each has, and where they belong."""
        rows_RD, own_e, sent = super().dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        own = int(own_e.sum())
        token_N, weight_N = sent.token_indices_experts_sorted_N[:own], sent.topk_scores_experts_sorted_N[:own]
        return rows_RD[:own], own_e, Combined.of(token_N, weight_N, len(x_TD), own)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """The weighted sum of each token's experts, on every rank."""
        assert self.add is not None, "ranks divide the experts"
        return _whole(self.add(metadata.sums(routed_output_RD)), x_TD)


def _whole(out_TG: Tensor, x_TD: Tensor) -> Tensor:
    """The sum of the slices that this rank has (numerics-8)."""
    first_TD, *others = out_TG.split(x_TD.shape[1], 1)
    for slice_TD in others:
        first_TD = first_TD + slice_TD
    return first_TD

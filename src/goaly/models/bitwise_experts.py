"""Mixtures of experts with `model.numerics=bitwise`: a token gets the same bits however ranks divide the experts.

A tensor-parallel rank has a part of every expert's hidden features, an expert-parallel rank has some whole experts, and
a rank that gets its tokens' rows back from other ranks has a row of each expert. All of them add the numbers of BE-2 in
its order: a rank has either all that one sum needs, or one of two numbers that are added last.

Gradients are those of the ordinary experts.

Shape suffixes: B = 1, L tokens, T the same, D model dim, E experts, e those of this rank, K experts of a token, R rows
routed to experts, grouped by expert, N the rows of all experts, F inputs and G outputs of a product, S slices of the
hidden features that this rank has.

Invariants
    BE-1  A token's experts are those with the highest scores, and of equal ones those with the lowest numbers. They are
          in the order of their numbers, and their weights are divided by the sum in this order.
    BE-2  A token's output is the sum of `SLICES` slices, each the sum of the lower and the upper half of the experts. A
          half is the sum of weight times output in the order of the experts, in float32, rounded to the model's type.
          An expert's output of a slice is the rounded product with that slice of its hidden features (BW-2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.distributed.spmd_types import current_spmd_mesh
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from goaly.models.bitwise import multiply, row_multiple, silu
from goaly.models.experts import Dispatcher, Experts, OwnExpertsDispatcher
from goaly.models.settings import SLICES


class BitwiseRouter(TokenChoiceTopKRouter):
    """Chooses experts by the softmax of exact logits, in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """torchtitan's."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The weights of each token's experts, the experts (BE-1), and the scores of all."""
        scores_BLE = F.softmax(self.gate(x_BLD).float(), dim=-1)
        preferred_BLE = scores_BLE if expert_bias_E is None else scores_BLE + expert_bias_E
        experts_BLK = highest(_local(preferred_BLE.detach()), self.top_k)
        if isinstance(preferred_BLE, DTensor):
            placed = preferred_BLE.device_mesh, preferred_BLE.placements
            experts_BLK = DTensor.from_local(experts_BLK, *placed, run_check=False)
        weights_BLK = scores_BLE.gather(-1, experts_BLK)
        if self.route_norm:
            total_BL1 = weights_BLK[..., :1]
            for number in range(1, self.top_k):
                total_BL1 = total_BL1 + weights_BLK[..., number : number + 1]
            weights_BLK = weights_BLK / total_BL1
        return weights_BLK * self.route_scale, experts_BLK, scores_BLE


def highest(scores_BLE: torch.Tensor, count: int) -> torch.Tensor:
    """The numbers of the highest scores, in order (BE-1)."""
    best_BLE = scores_BLE.sort(dim=-1, descending=True, stable=True).indices
    return best_BLE[..., :count].sort(dim=-1).values  # choices that are replayed have no other order


class BitwiseExperts(Experts):
    """Gives each row its expert's output, an exact product for each slice of the hidden features: rows `[R, S * D]`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Experts.Config):
        """The experts'."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._hidden_dim = config.hidden_dim

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """The slices' outputs of each row, side by side."""
        w1, w2, w3 = (_local(weight) for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        slices = SLICES * w2.shape[2] // self._hidden_dim
        return by_expert(x_RD, w1, w2, w3, num_tokens_per_expert_E.tolist(), slices)


def by_expert(
    x_RD: torch.Tensor,
    w1_eFD: torch.Tensor,
    w2_eDF: torch.Tensor,
    w3_eFD: torch.Tensor,
    rows: Sequence[int],
    slices: int = 1,
) -> torch.Tensor:
    """The output of each expert's network for its rows, of each slice of the hidden features, side by side (BW-1)."""
    if torch.is_grad_enabled():
        return _Networks.apply(x_RD, w1_eFD, w2_eDF, w3_eFD, rows, slices)
    return _networks(x_RD, w1_eFD, w2_eDF, w3_eFD, rows, slices)[0]


def _networks(
    x_RD: torch.Tensor,
    w1_eFD: torch.Tensor,
    w2_eDF: torch.Tensor,
    w3_eFD: torch.Tensor,
    rows: Sequence[int],
    slices: int,
) -> tuple[torch.Tensor, ...]:
    """The output, the gate, what is made of it, the up projection and the hidden features."""
    multiple = row_multiple()
    starts = [end - count for end, count in zip(accumulate(rows), rows, strict=True)]
    # Rows of the next experts make a multiple of an expert's; what they give is overwritten by theirs.
    spans = [(expert, starts[expert], starts[expert] + _up(n, multiple)) for expert, n in enumerate(rows) if n]
    total, end = len(x_RD), max((stop for *_, stop in spans), default=0)
    if end > total:
        x_RD = torch.cat([x_RD, x_RD.new_zeros(end - total, x_RD.shape[1])])
    gate_RF, up_RF = _products(x_RD, w1_eFD, spans), _products(x_RD, w3_eFD, spans)
    active_RF = silu(gate_RF)
    hidden_RF = active_RF * up_RF
    return _products(hidden_RF, w2_eDF, spans, slices)[:total], gate_RF, active_RF, up_RF, hidden_RF


def _products(
    x_RF: torch.Tensor, weight_eGF: torch.Tensor, spans: Sequence[tuple[int, int, int]], slices: int = 1
) -> torch.Tensor:
    """The product of each expert's span of rows with each slice of its weight, side by side."""
    width = weight_eGF.shape[1]
    out_RG = torch.empty(len(x_RF), slices * width)
    parts = (x_RF.float().chunk(slices, 1), weight_eGF.float().chunk(slices, 2), out_RG.chunk(slices, 1))
    for part_RF, part_eGF, part_RG in zip(*parts, strict=True):
        weights = part_eGF.unbind()
        for expert, start, stop in spans:
            multiply(part_RF[start:stop], weights[expert], part_RG[start:stop])
    return out_RG.to(weight_eGF.dtype)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class _Networks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: torch.Tensor,
        w1_eFD: torch.Tensor,
        w2_eDF: torch.Tensor,
        w3_eFD: torch.Tensor,
        rows: Sequence[int],
        slices: int,
    ) -> torch.Tensor:
        out_RG, *computed = _networks(x_RD, w1_eFD, w2_eDF, w3_eFD, rows, slices)
        ctx.save_for_backward(x_RD, w1_eFD, w2_eDF, w3_eFD, *computed)
        ctx.rows, ctx.slices = rows, slices
        return out_RG

    @staticmethod
    def backward(ctx: Any, grad_RG: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """An expert at a time: the gradients of its hidden features stay in the processor's cache."""
        inputs, computed = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        x_RD, w1_eFD, w2_eDF, w3_eFD = inputs
        grads = grad_x_RD, grad_w1_eFD, grad_w2_eDF, grad_w3_eFD = [torch.empty_like(one) for one in inputs]
        stop = 0
        for expert, count in enumerate(ctx.rows):
            start, stop = stop, stop + count
            x, grad_x, grad = x_RD[start:stop], grad_x_RD[start:stop], grad_RG[start:stop]
            gate, active, up, hidden = (one[start:stop] for one in computed)
            grad_hidden = torch.empty_like(hidden)
            cut = grad, w2_eDF[expert], hidden, grad_hidden, grad_w2_eDF[expert]
            parts = (one.chunk(ctx.slices, 1) for one in cut)
            for grad_out, w2, of_slice, grad_of_slice, grad_w2 in zip(*parts, strict=True):
                torch.mm(grad_out, w2, out=grad_of_slice)
                torch.mm(grad_out.t(), of_slice, out=grad_w2)
            grad_up = grad_hidden * active
            grad_gate = torch.ops.aten.silu_backward(grad_hidden.mul_(up), gate)
            torch.mm(grad_gate, w1_eFD[expert], out=grad_x)
            grad_x.addmm_(grad_up, w3_eFD[expert])
            torch.mm(grad_gate.t(), x, out=grad_w1_eFD[expert])
            torch.mm(grad_up.t(), x, out=grad_w3_eFD[expert])
        return *grads, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Where the rows of a layer's experts are added, in the order of BE-2."""

    row_N: torch.Tensor
    """The rows in the order of halves, tokens and experts."""
    bag_N: torch.Tensor
    """Half and token of each row, as `half * T + token`; the same order as the rows."""
    weight_N: torch.Tensor
    """The weights, in the order of `row_N`."""
    tokens: int

    @classmethod
    def of(cls, token_N: torch.Tensor, weight_N: torch.Tensor, tokens: int, lower: int) -> "Combined":
        """The places of rows that are in the order of the experts, of which `lower` are of the lower half."""
        bag_N = token_N.clone()
        bag_N[lower:] += tokens
        row_N = torch.argsort(bag_N, stable=True)
        return cls(row_N=row_N, bag_N=bag_N, weight_N=weight_N[row_N], tokens=tokens)

    def add(self, rows_NG: torch.Tensor) -> torch.Tensor:
        """Each token's weighted sum of its rows."""
        if torch.is_grad_enabled():
            return _WeightedSum.apply(rows_NG, self.weight_N, self)
        return self.sums(rows_NG)

    def sums(self, rows_NG: torch.Tensor) -> torch.Tensor:
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
    def forward(ctx: Any, rows_NG: torch.Tensor, weight_N: torch.Tensor, combined: Combined) -> torch.Tensor:
        ctx.save_for_backward(rows_NG, weight_N)
        ctx.combined = combined
        return combined.sums(rows_NG)

    @staticmethod
    def backward(ctx: Any, grad_TG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows_NG, weight_N = ctx.saved_tensors
        combined = ctx.combined
        grad_NG = grad_TG[combined.bag_N % combined.tokens].float()
        grad_weight_N = (grad_NG * rows_NG).sum(1)[combined.row_N].to(weight_N.dtype)
        weights_N = torch.empty_like(weight_N).index_copy_(0, combined.row_N, weight_N)
        return grad_NG.mul_(weights_N[:, None]).to(rows_NG.dtype), grad_weight_N, None


class BitwiseDispatcher(Dispatcher):
    """Sends tokens to their experts, and adds what comes back in the order of BE-2."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dispatcher.Config):
        """torchtitan's."""

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The rows of this rank's experts, how many each has, and where they belong."""
        rows_RD, own_e, sent = super().dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        lower = int(num_local_tokens_per_expert_E[: self.num_experts // 2].sum())
        token_N, weight_N = sent.token_indices_experts_sorted_N, sent.topk_scores_experts_sorted_N
        return rows_RD, own_e, (sent, Combined.of(token_N, weight_N, len(x_TD), lower))

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts."""
        sent, combined = metadata
        if self.ep_mesh is not None:
            by_rank_RG = self._unpermute(routed_output_RD, routed_output_RD.shape, sent.permuted_indices)
            routed_output_RD = self._combine_token_exchange(
                by_rank_RG, self.ep_mesh.get_group(), sent.input_splits, sent.output_splits
            )
        return _whole(combined.add(routed_output_RD), x_TD)


class BitwiseOwnExpertsDispatcher(OwnExpertsDispatcher):
    """Lets ranks that have all tokens and one half of the experts each add their outputs in the order of BE-2."""

    @dataclass(kw_only=True, slots=True)
    class Config(OwnExpertsDispatcher.Config):
        """The experts of this rank."""

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The rows of this rank's experts, how many each has, and where they belong."""
        rows_RD, own_e, sent = super().dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        own = int(own_e.sum())
        token_N, weight_N = sent.token_indices_experts_sorted_N[:own], sent.topk_scores_experts_sorted_N[:own]
        return rows_RD[:own], own_e, Combined.of(token_N, weight_N, len(x_TD), own)

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, on every rank."""
        half_TG = metadata.sums(routed_output_RD)
        mesh = current_spmd_mesh()
        assert mesh is not None, "ranks divide the experts"
        dist.all_reduce(half_TG, group=mesh.get_group("tp"))
        return _whole(half_TG, x_TD)


def _whole(out_TG: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
    """The sum of the slices that this rank has (BE-2)."""
    first_TD, *others = out_TG.split(x_TD.shape[1], 1)
    for slice_TD in others:
        first_TD = first_TD + slice_TD
    return first_TD


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""The parts of a mixture of experts in which goaly differs from torchtitan, on one rank and on many.

Shape suffixes: B = 1, L tokens, T the same, D model dim, E experts, e those of this rank, K experts of a token, R rows
routed to experts, grouped by expert, F an expert's hidden dim.
"""

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
    LocalTokenDispatcher,
)

from goaly.numerics.layer_replacement import of_rank

warnings.filterwarnings(
    "ignore", message="In CPU autocast, but the target dtype"
)  # torchtitan's router asks for float32


ABOVE_ALL_SCORES = 1e3
"""More than any difference of two router scores, with biases."""


class Experts(GroupedExperts):
    """Gated feed-forward networks, one for each expert, in the type of their parameters: torchtitan's compute in
    bfloat16 only."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """torchtitan's."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Each token's output of the expert that it is routed to."""
        ends_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        hidden_RF = F.silu(self._product(x_RD, "w1_EFD", ends_E)) * self._product(x_RD, "w3_EFD", ends_E)
        return self._product(hidden_RF, "w2_EDF", ends_E)

    def _product(self, rows: Tensor, name: str, ends_E: Tensor) -> Tensor:
        """The rows of each expert times its weights of this name."""
        return self._grouped_mm(A=rows, B_t=of_rank(getattr(self, name)).transpose(-2, -1), offs=ends_E)


class MixtureOfExperts(MoE):
    """A layer whose router sends each token to a few experts.

    If `choices_BLK` is set, the tokens that `replayed_BL1` marks with 1 go to these experts. The weights of the experts
    are the router's in any case, and have its gradient.

    In passes that are differentiated, `tokens_per_expert_E` counts the tokens that `trained_BL1` marks with 1,
    `rerouted` their choices that the router would have made differently, and the gradient of their router scores gets
    `score_gradient_E` added, if it is set.
    """

    choices_BLK: Tensor | None = None
    replayed_BL1: Tensor | None = None
    trained_BL1: Tensor | None = None
    rerouted: Tensor | None = None
    score_gradient_E: Tensor | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """torchtitan's."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        """The weighted sum of each token's experts, and the output of the shared expert if there is one."""
        # A tensor-parallel rank's gradients of the two are placed differently, and DTensor would add them as they are.
        router_BLD, experts_BLD = (x_BLD * 1.0, x_BLD * 1.0) if isinstance(x_BLD, DTensor) else (x_BLD, x_BLD)
        weights_BLK, experts_BLK, scores_BLE = self.router(router_BLD, self._preferences(router_BLD))
        chosen_BLE = torch.zeros_like(scores_BLE, dtype=torch.bool).scatter_(-1, experts_BLK, True)
        if torch.is_grad_enabled() and self.trained_BL1 is not None:
            trained_BL1 = _placed_as(scores_BLE, self.trained_BL1)
            self._balance(scores_BLE, of_rank(chosen_BLE), trained_BL1)
            if self.choices_BLK is not None:
                self._compare(router_BLD, of_rank(chosen_BLE), trained_BL1)
        tokens_E = chosen_BLE.sum(dim=(0, 1))
        out_BLD = self.routed_experts(experts_BLD, weights_BLK, experts_BLK, tokens_E)
        return out_BLD if self.shared_experts is None else out_BLD + self.shared_experts(x_BLD)

    def _preferences(self, x_BLD: Tensor) -> Tensor | None:
        """The bias that the router adds to its scores for the choice, and not to the weights of the chosen experts."""
        if self.choices_BLK is None:
            return self.expert_bias_E
        choices_BLK = self.choices_BLK.long()
        preferred_BLE = torch.zeros(*choices_BLK.shape[:2], self.router.num_experts, device=choices_BLK.device)
        preferred_BLE = preferred_BLE.scatter_(-1, choices_BLK, ABOVE_ALL_SCORES) * self.replayed_BL1
        preferred_BLE = _on_every_rank(x_BLD, preferred_BLE)
        return preferred_BLE if self.expert_bias_E is None else preferred_BLE + self.expert_bias_E

    def _balance(self, scores_BLE: Tensor, chosen_BLE: Tensor, trained_BL1: Tensor) -> None:
        of_rank(self.tokens_per_expert_E).add_((chosen_BLE * trained_BL1).sum(dim=(0, 1)))
        if self.score_gradient_E is None or not scores_BLE.requires_grad:  # no gradient: nothing before it is trained
            return
        mesh, placements = (
            (scores_BLE.device_mesh, scores_BLE.placements) if isinstance(scores_BLE, DTensor) else (None, ())
        )
        added_BLE = trained_BL1 * self.score_gradient_E

        def add(gradient_BLE: Tensor) -> Tensor:  # without a reference to the scores, which have the hook
            if not isinstance(gradient_BLE, DTensor):
                return (gradient_BLE + added_BLE).to(gradient_BLE.dtype)  # which may be bfloat16
            whole_BLE = gradient_BLE.redistribute(placements=placements)  # of partial sums, each rank would add it
            local_BLE = (whole_BLE.to_local() + added_BLE).to(whole_BLE.dtype)
            return DTensor.from_local(local_BLE, mesh, placements, run_check=False)

        scores_BLE.register_hook(add)

    @torch.no_grad()
    def _compare(self, x_BLD: Tensor, chosen_BLE: Tensor, trained_BL1: Tensor) -> None:
        """Count the choices that the router would have made differently."""
        _, own_BLK, _ = self.router(x_BLD, self.expert_bias_E)
        own_BLE = torch.zeros_like(chosen_BLE).scatter_(-1, of_rank(own_BLK), True)
        self.rerouted += ((chosen_BLE & ~own_BLE) * trained_BL1).sum()


def _placed_as(placed: Tensor, tensor: Tensor) -> Tensor:
    """The rank's part of a tensor that every rank has, if it is to be divided as another one."""
    whole = _on_every_rank(placed, tensor)
    if not (isinstance(placed, DTensor) and isinstance(whole, DTensor)):
        return tensor
    return whole.redistribute(placements=placed.placements).to_local()


def _on_every_rank(like: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that every rank has, as a DTensor if the other one is."""
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


class Dispatcher(AllToAllTokenDispatcher):
    """Sends tokens to their experts, as torchtitan's, with gradients that are the same each time.

    In passes that are differentiated, `made` counts the choices of this rank's tokens, and `computed` the rows that
    this rank's experts compute, if they are set.
    """

    made: Tensor | None = None
    computed: Tensor | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """torchtitan's."""

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, LocalDispatchMetadata]:
        """The rows of this rank's experts, how many each has, and where they belong."""
        rows_RD, own_e, sent = super().dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        if self.made is not None and self.computed is not None and torch.is_grad_enabled():
            self.made += topk_expert_ids_TK.numel()
            self.computed += own_e.sum().clamp(max=len(rows_RD))
        return rows_RD, own_e, sent

    def _local_reorder(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, tokens and weights, by expert. On a CPU with several threads, the gradient of a row that is indexed
        several times would be summed in any order."""
        if x_TD.device.type != "cpu" or not x_TD.requires_grad:
            return super()._local_reorder(x_TD, topk_scores_TK, topk_expert_ids_TK)
        order_R = torch.argsort(topk_expert_ids_TK.view(-1), stable=True)
        rows_RD = x_TD.repeat_interleave(self.top_k, dim=0)[order_R]
        return rows_RD, order_R // self.top_k, topk_scores_TK.view(-1)[order_R]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnRows(LocalDispatchMetadata):
    is_own_R: Tensor


class OwnExpertsDispatcher(LocalTokenDispatcher):
    """Gives a rank that has all tokens and some of the experts the tokens of these experts. The sum of the ranks'
    outputs is the layer's. No shape depends on the routing, so it can be recorded as a CUDA graph."""

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        """The experts of this rank: `count` of them, from `first` on."""

        first: int
        count: int

    def __init__(self, config: Config):
        super().__init__(config)
        self._first, self._count = config.first, config.count

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, LocalDispatchMetadata]:
        """The rows of all tokens, those of this rank's experts first; how many each of these has; where they belong."""
        number_TK = (topk_expert_ids_TK - self._first) % self.num_experts
        rows_RD, tokens_R, weights_R = self._local_reorder(x_TD, topk_scores_TK, number_TK)
        own_e = num_local_tokens_per_expert_E[self._first : self._first + self._count]
        is_own_R = torch.arange(len(rows_RD), device=rows_RD.device) < own_e.sum()
        return (
            rows_RD,
            own_e,
            _OwnRows(
                token_indices_experts_sorted_N=tokens_R, topk_scores_experts_sorted_N=weights_R, is_own_R=is_own_R
            ),
        )

    def combine(self, routed_output_RD: Tensor, metadata: LocalDispatchMetadata, x_TD: Tensor) -> Tensor:
        """The weighted sum of this rank's experts for each token."""
        assert isinstance(metadata, _OwnRows)
        others_R1 = ~metadata.is_own_R[:, None]  # nothing was computed for their rows
        return super().combine(routed_output_RD.masked_fill(others_R1, 0.0), metadata, x_TD)

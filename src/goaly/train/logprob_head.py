"""Log-probabilities and entropies of given tokens, computed from hidden states without the full logits.

`LogprobHead` replaces the model's output projection. It holds the same weight and takes the target tokens, so logits
exist for one chunk of tokens at a time, in the forward and again in the backward pass.

A model that computes in bfloat16 has bfloat16 hidden states and weights; everything computed from them here is float32.
vLLM rounds logits to bfloat16 before its float32 log-softmax, so the log-probs of a bfloat16 sampler differ by that
rounding, unless `model.numerics` is bitwise.

Shape suffixes: T tokens of a microbatch, P predicted tokens, C tokens of a chunk, D model width, V vocabulary (on
tensor-parallel ranks: this rank's part of it).

At most `chunk` rows of logits exist at a time. Under tensor parallelism no rank holds whole rows of logits, and all
ranks get the same results. Logits, log-probs and the weight's gradient, summed over chunks, are float32 for any compute
type. On a CPU gradients are rounded once, at the end. A GPU also rounds the gradient of the logits to the compute type
before it multiplies it with hidden states and weight.

Invariant
    train-10: With bitwise numerics log-probs are those of vLLM's sampler: logits of the model's type, over the whole
        vocabulary on each rank, through the same log-softmax. Ranks then hold whole rows of logits, and
        the float32 sums above do not apply.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.sharding import ShardingConfig

from goaly.numerics.bitwise_layers import BitwiseLinear
from goaly.numerics.bitwise_operations import log_softmax, product
from goaly.train.parallel_model import Head


class LogprobHead(Linear):
    """The model's output projection; it returns log-probs of targets instead of logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A linear layer's."""

        exact: bool = False
        """Whether log-probs are the sampler's to the last bit (train-10)."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._exact = config.exact

    def forward(
        self, input: Tensor, predicting_P: Tensor, targets_P: Tensor, chunk: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """`(logprobs_P, entropies_P)` of `targets_P`, each predicted by the hidden state numbered in `predicting_P`."""
        weight, group, offset = self.weight, None, 0
        if isinstance(weight, DTensor):
            group = weight.device_mesh.get_group("tp")
            offset = dist.get_rank(group) * -(-self.out_features // dist.get_world_size(group))
            weight = weight.to_local()
        if isinstance(input, DTensor):
            # Each rank's gradient comes from its part of the vocabulary only.
            input = input.to_local(grad_placements=[Partial()])
        hidden_PD = input.reshape(-1, input.shape[-1]).index_select(0, predicting_P)
        return _Logprobs.apply(hidden_PD, weight, targets_P, chunk, temperature, group, offset, self._exact)


def _install(decoder: Any) -> None:
    linear, sharding = decoder.lm_head, decoder.lm_head.sharding_config
    decoder.lm_head = LogprobHead.Config(
        in_features=linear.in_features,
        out_features=linear.out_features,
        param_init=linear.param_init,
        exact=isinstance(linear, BitwiseLinear.Config),
        sharding_config=sharding and ShardingConfig(state_shardings=sharding.state_shardings),
    )


LOGPROBS = Head(of="train", install=_install, in_folder=True)


class _Logprobs(torch.autograd.Function):
    """Chunked log-softmax of a linear layer, gathered at the targets; the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        targets_P: Tensor,
        chunk: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        offset: int,
        exact: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalizers = [], [], []
        for hidden_CD, targets_C in zip(hidden_PD.split(chunk), targets_P.split(chunk), strict=True):
            logits_CV = _logits(hidden_CD, weight_VD, temperature, exact)
            if exact:
                logprob_C, entropy_C, normalizer_C = _as_sampled(_whole_rows(logits_CV, group), targets_C)
                logprobs.append(logprob_C)
                entropies.append(entropy_C)
                normalizers.append(normalizer_C)
                continue
            local_C, mine_C = _local_targets(targets_C, offset, logits_CV.shape[1])
            chosen_C = logits_CV.gather(1, local_C[:, None]).squeeze(1)
            if group is None:
                normalizer_C = logits_CV.logsumexp(1)
                entropy_C = _entropy(logits_CV, normalizer_C)
            else:
                # ranks exchange one number a token.
                highest_C = logits_CV.amax(1)
                dist.all_reduce(highest_C, dist.ReduceOp.MAX, group)
                total_C = (logits_CV - highest_C[:, None]).exp_().sum(1)
                dist.all_reduce(total_C, dist.ReduceOp.SUM, group)
                normalizer_C = highest_C + total_C.log()
                sums_2C = torch.stack([torch.where(mine_C, chosen_C, 0.0), _entropy(logits_CV, normalizer_C)])
                dist.all_reduce(sums_2C, dist.ReduceOp.SUM, group)
                chosen_C, entropy_C = sums_2C
            logprobs.append(chosen_C - normalizer_C)
            entropies.append(entropy_C)
            normalizers.append(normalizer_C)
        logprobs_P, entropies_P, normalizers_P = (torch.cat(parts) for parts in (logprobs, entropies, normalizers))
        ctx.save_for_backward(hidden_PD, weight_VD, targets_P, normalizers_P, entropies_P)
        ctx.chunk, ctx.temperature, ctx.offset, ctx.exact = chunk, temperature, offset, exact
        ctx.set_materialize_grads(False)
        return logprobs_P, entropies_P

    @staticmethod
    def backward(ctx: Any, grad_logprobs_P: Tensor | None, grad_entropies_P: Tensor | None) -> Any:
        hidden_PD, weight_VD, targets_P, normalizers_P, entropies_P = ctx.saved_tensors
        grad_hidden_PD = torch.empty_like(hidden_PD)
        trains = ctx.needs_input_grad[1]
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if trains else None
        for start in range(0, len(targets_P), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden_CD = hidden_PD[part]
            log_softmax_CV = _logits(hidden_CD, weight_VD, ctx.temperature, ctx.exact).sub_(normalizers_P[part, None])
            softmax_CV = log_softmax_CV.exp()
            grad_CV = torch.zeros_like(softmax_CV)
            if grad_entropies_P is not None:
                surprise_CV = log_softmax_CV.add_(entropies_P[part, None])
                grad_CV.addcmul_(softmax_CV * surprise_CV, grad_entropies_P[part, None], value=-1)
            if grad_logprobs_P is not None:
                grad_C = grad_logprobs_P[part]
                grad_CV.addcmul_(softmax_CV, grad_C[:, None], value=-1)
                local_C, mine_C = _local_targets(targets_P[part], ctx.offset, grad_CV.shape[1])
                grad_CV.scatter_add_(1, local_C[:, None], torch.where(mine_C, grad_C, 0.0)[:, None])
            grad_CV.div_(ctx.temperature)
            grad_hidden_PD[part] = _product(grad_CV, weight_VD)
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV.t(), hidden_CD)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_PD, grad_weight_VD, None, None, None, None, None, None


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, exact: bool) -> Tensor:
    logits_CV = product(hidden_CD, weight_VD).float() if exact else _product(hidden_CD, weight_VD.t())
    if temperature == 1.0:
        return logits_CV
    # By a tensor, as vLLM does (train-10): a GPU multiplies by the reciprocal of a number.
    return logits_CV.div_(logits_CV.new_full((), temperature) if exact else temperature)


def _as_sampled(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs as vLLM computes them (train-10), entropies and normalizers."""
    log_softmax_CV = log_softmax(logits_CV)
    logprob_C = log_softmax_CV.gather(1, targets_C[:, None]).squeeze(1)
    chosen_C = logits_CV.gather(1, targets_C[:, None]).squeeze(1)
    return logprob_C, -log_softmax_CV.exp().mul_(log_softmax_CV).sum(1), chosen_C - logprob_C


def _whole_rows(logits_CV: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The logits of all ranks' parts of the vocabulary."""
    if group is None:
        return logits_CV
    parts = [torch.empty_like(logits_CV) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits_CV.contiguous(), group)
    return torch.cat(parts, 1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product with float32 accumulation and result.

    On a GPU a float32 `a`, such as the gradient of the logits, is first rounded to the type of `b`.
    """
    if b.is_cuda and b.dtype != torch.float32:
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product, computed as in `_product`, to a float32 total."""
    if b.is_cuda and b.dtype != torch.float32:
        torch.addmm(total, a.to(b.dtype), b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _local_targets(targets_C: Tensor, offset: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The column of each target on this rank, clamped into range, and whether this rank holds it."""
    local_C = targets_C - offset
    mine_C = (local_C >= 0) & (local_C < vocabulary)
    return local_C.clamp_(0, max(vocabulary - 1, 0)), mine_C


def _entropy(logits_CV: Tensor, normalizer_C: Tensor) -> Tensor:
    """The entropy of the softmax (this rank's part of the sum); all terms are positive, so none cancel."""
    log_softmax_CV = logits_CV - normalizer_C[:, None]
    return -log_softmax_CV.exp().mul_(log_softmax_CV).sum(1)

"""Log-probabilities and entropies of given tokens, computed from hidden states without the full logits.

`LogprobHead` replaces the model's output projection. It holds the same weight and takes the target tokens, so logits
exist for one chunk of tokens at a time, in the forward and again in the backward pass.

A model that computes in bfloat16 has bfloat16 hidden states and weights; everything computed from them here is float32.
vLLM rounds logits to bfloat16 before its float32 log-softmax, so the log-probs of a bfloat16 sampler differ by that
rounding, unless `model.numerics` is bitwise.

For distillation it also gives the log-probs of further tokens at each place, and of the most likely ones.

Shape suffixes: T tokens of a microbatch, P predicted tokens, C tokens of a chunk, D model width, V vocabulary (on
tensor-parallel ranks: this rank's part of it), K tokens at each place, J the target and K others.

At most `chunk` rows of logits exist at a time. Under tensor parallelism no rank holds whole rows of logits, and all
ranks get the same results. Logits, log-probs and the weight's gradient, summed over chunks, are float32 for any compute
type. On a CPU gradients are rounded once, at the end. A GPU also rounds the gradient of the logits to the compute type
before it multiplies it with hidden states and weight.

Invariant
    train-10: With bitwise numerics log-probs are those of vLLM's sampler: logits of the model's type, over the whole
        vocabulary on each rank, through the same log-softmax. Ranks then hold whole rows of logits, and
        the float32 sums above do not apply.
"""

import math
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
        self,
        input: Tensor,
        predicting_P: Tensor,
        targets_P: Tensor,
        chunk: int,
        temperature: float,
        *,
        others_PK: Tensor | None = None,
        top_k: int = 0,
    ) -> tuple[Tensor, ...]:
        """`(logprobs_P, entropies_P)` of `targets_P`, each predicted by the hidden state numbered in `predicting_P`.

        With `others_PK` also the log-probs of these tokens in place of the target; with `top_k` also the most likely
        tokens and their log-probs `[P, K]`, both as floats and without a gradient.
        """
        weight, group, offset = self.weight, None, 0
        if isinstance(weight, DTensor):
            group = weight.device_mesh.get_group("tp")
            offset = dist.get_rank(group) * -(-self.out_features // dist.get_world_size(group))
            weight = weight.to_local()
        if isinstance(input, DTensor):
            # Each rank's gradient comes from its part of the vocabulary only.
            input = input.to_local(grad_placements=[Partial()])
        hidden_PD = input.reshape(-1, input.shape[-1]).index_select(0, predicting_P)
        targets_PJ = targets_P[:, None] if others_PK is None else torch.cat([targets_P[:, None], others_PK], 1)
        given = targets_PJ, chunk, temperature, group, offset, self._exact, top_k
        logprobs_PJ, entropies_P, tokens_PK, top_PK = _Logprobs.apply(hidden_PD, weight, *given)
        others = () if others_PK is None else (logprobs_PJ[:, 1:],)
        return (logprobs_PJ[:, 0], entropies_P, *others, *((tokens_PK, top_PK) if top_k else ()))


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
        targets_PJ: Tensor,
        chunk: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        offset: int,
        exact: bool,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logprobs, entropies, normalizers, top_tokens, top_logprobs = [], [], [], [], []

        def keep(logprob_CJ: Tensor, entropy_C: Tensor, normalizer_C: Tensor) -> None:
            logprobs.append(logprob_CJ)
            entropies.append(entropy_C)
            normalizers.append(normalizer_C)

        for hidden_CD, targets_CJ in zip(hidden_PD.split(chunk), targets_PJ.split(chunk), strict=True):
            logits_CV = _logits(hidden_CD, weight_VD, temperature, exact)
            if exact:
                keep(*_as_sampled(_whole_rows(logits_CV, group), targets_CJ))
                if top_k:
                    _keep_top(_top(logits_CV, top_k, group, offset), normalizers[-1], top_tokens, top_logprobs)
                continue
            local_CJ, mine_CJ = _local_targets(targets_CJ, offset, logits_CV.shape[1])
            chosen_CJ = logits_CV.gather(1, local_CJ)
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
                own_CJ = torch.where(mine_CJ, chosen_CJ, 0.0)
                sums = torch.cat([own_CJ, _entropy(logits_CV, normalizer_C)[:, None]], 1)
                dist.all_reduce(sums, dist.ReduceOp.SUM, group)
                chosen_CJ, entropy_C = sums[:, :-1], sums[:, -1]
            keep(chosen_CJ - normalizer_C[:, None], entropy_C, normalizer_C)
            if top_k:
                _keep_top(_top(logits_CV, top_k, group, offset), normalizer_C, top_tokens, top_logprobs)
        logprobs_PJ, entropies_P, normalizers_P = (torch.cat(parts) for parts in (logprobs, entropies, normalizers))
        ctx.save_for_backward(hidden_PD, weight_VD, targets_PJ, normalizers_P, entropies_P)
        ctx.chunk, ctx.temperature, ctx.offset, ctx.exact = chunk, temperature, offset, exact
        ctx.set_materialize_grads(False)
        none_P0 = entropies_P.new_zeros(len(entropies_P), 0)
        top = (torch.cat(top_tokens), torch.cat(top_logprobs)) if top_k else (none_P0, none_P0.clone())
        ctx.mark_non_differentiable(*top)
        return logprobs_PJ, entropies_P, *top

    @staticmethod
    def backward(ctx: Any, grad_logprobs_PJ: Tensor | None, grad_entropies_P: Tensor | None, *_: Any) -> Any:
        hidden_PD, weight_VD, targets_PJ, normalizers_P, entropies_P = ctx.saved_tensors
        grad_hidden_PD = torch.empty_like(hidden_PD)
        trains = ctx.needs_input_grad[1]
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if trains else None
        for start in range(0, len(targets_PJ), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden_CD = hidden_PD[part]
            log_softmax_CV = _logits(hidden_CD, weight_VD, ctx.temperature, ctx.exact).sub_(normalizers_P[part, None])
            softmax_CV = log_softmax_CV.exp()
            grad_CV = torch.zeros_like(softmax_CV)
            if grad_entropies_P is not None:
                surprise_CV = log_softmax_CV.add_(entropies_P[part, None])
                grad_CV.addcmul_(softmax_CV * surprise_CV, grad_entropies_P[part, None], value=-1)
            if grad_logprobs_PJ is not None:
                grad_CJ = grad_logprobs_PJ[part]
                grad_CV.addcmul_(softmax_CV, grad_CJ.sum(1, keepdim=True), value=-1)
                local_CJ, mine_CJ = _local_targets(targets_PJ[part], ctx.offset, grad_CV.shape[1])
                grad_CV.scatter_add_(1, local_CJ, torch.where(mine_CJ, grad_CJ, 0.0))
            grad_CV.div_(ctx.temperature)
            grad_hidden_PD[part] = _product(grad_CV, weight_VD)
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV.t(), hidden_CD)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_PD, grad_weight_VD, *[None] * 7


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, exact: bool) -> Tensor:
    logits_CV = product(hidden_CD, weight_VD).float() if exact else _product(hidden_CD, weight_VD.t())
    if temperature == 1.0:
        return logits_CV
    # By a tensor, as vLLM does (train-10): a GPU multiplies by the reciprocal of a number.
    return logits_CV.div_(logits_CV.new_full((), temperature) if exact else temperature)


def _as_sampled(logits_CV: Tensor, targets_CJ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs as vLLM computes them (train-10), entropies and normalizers."""
    log_softmax_CV = log_softmax(logits_CV)
    logprob_CJ = log_softmax_CV.gather(1, targets_CJ)
    chosen_C = logits_CV.gather(1, targets_CJ[:, :1]).squeeze(1)
    entropy_C = -log_softmax_CV.exp().mul_(log_softmax_CV).sum(1)
    return logprob_CJ, entropy_C, chosen_C - logprob_CJ[:, 0]


def _top(logits_CV: Tensor, top_k: int, group: dist.ProcessGroup | None, offset: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens and their logits, of all ranks' parts of the vocabulary."""
    logits_CK, tokens_CK = logits_CV.topk(min(top_k, logits_CV.shape[1]), 1)
    tokens_CK = tokens_CK + offset
    if group is None:
        return tokens_CK, logits_CK
    short = top_k - logits_CK.shape[1]  # this rank's part may be smaller than that of others
    logits_CK = torch.nn.functional.pad(logits_CK, (0, short), value=-math.inf)
    tokens_CK = torch.nn.functional.pad(tokens_CK, (0, short))
    ranks = dist.get_world_size(group)
    logits, tokens = ([torch.empty_like(one) for _ in range(ranks)] for one in (logits_CK, tokens_CK))
    dist.all_gather(logits, logits_CK.contiguous(), group)
    dist.all_gather(tokens, tokens_CK.contiguous(), group)
    logits_CK, best_CK = torch.cat(logits, 1).topk(top_k, 1)
    return torch.cat(tokens, 1).gather(1, best_CK), logits_CK


def _keep_top(found: tuple[Tensor, Tensor], normalizer_C: Tensor, tokens: list[Tensor], logprobs: list[Tensor]) -> None:
    tokens_CK, logits_CK = found
    tokens.append(tokens_CK.float())  # exact: no vocabulary has 2^24 tokens
    logprobs.append((logits_CK - normalizer_C[:, None]).clamp_(max=0))


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


def _local_targets(targets_CJ: Tensor, offset: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The column of each target on this rank, clamped into range, and whether this rank holds it."""
    local_CJ = targets_CJ - offset
    mine_CJ = (local_CJ >= 0) & (local_CJ < vocabulary)
    return local_CJ.clamp_(0, max(vocabulary - 1, 0)), mine_CJ


def _entropy(logits_CV: Tensor, normalizer_C: Tensor) -> Tensor:
    """The entropy of the softmax (this rank's part of the sum); all terms are positive, so none cancel."""
    log_softmax_CV = logits_CV - normalizer_C[:, None]
    return -log_softmax_CV.exp().mul_(log_softmax_CV).sum(1)

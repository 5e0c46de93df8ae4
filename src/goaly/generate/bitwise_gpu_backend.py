"""vLLM on a GPU for `model.numerics=bitwise`: attention over its cache, and log-probs, by the trainer's kernels.

vLLM's own batch-invariant mode is not used. It makes vLLM agree with itself; the trainer would need the same paged
attention, which has no backward pass, and the same replacements of torch's operations in its process.
"""

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from goaly.models import bitwise_kernels
from goaly.models.bitwise_attention import by_token
from goaly.models.bitwise_rows import log_softmax


class BitwiseGpuBackend(TritonAttentionBackend):
    """vLLM's backend, with another kernel."""

    @staticmethod
    def get_impl_cls() -> Any:
        """The class that attends."""
        return BitwiseGpuImplementation

    @staticmethod
    def get_builder_cls() -> Any:
        """The class that describes a step."""
        return BitwiseGpuBuilder


class BitwiseGpuBuilder(TritonAttentionMetadataBuilder):
    """Describes a step by its tokens, each a request of its own."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """vLLM's description, with the length and the pages of each token."""
        step = common_attn_metadata
        described: Any = super().build(common_prefix_len, step, fast_build)
        starts, ends = step.query_start_loc[:-1], step.query_start_loc[1:]
        described.of_tokens = by_token(ends, step.seq_lens, step.block_table_tensor, starts, step.num_actual_tokens)
        return described


class BitwiseGpuImplementation(TritonAttentionImpl):
    """Runs the kernel over vLLM's cache."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over the cache; without a description, as in a warm-up, give zeros."""
        if attn_metadata is None:
            return output.fill_(0)
        lengths_T, pages_TM = attn_metadata.of_tokens  # BA-1
        tokens, (keys, values) = len(lengths_T), kv_cache.split(self.head_size, dim=-1)
        bitwise_kernels.attend(query[:tokens], keys, values, output[:tokens], lengths_T, pages_TM, self.scale)
        return output


def use_exact_logprobs(sampler: Any) -> None:
    """Let this sampler of vLLM's first model runner compute log-probs over all tokens as the trainer does (LP-4)."""
    within = sampler.topk_topp_sampler
    draw = within.forward

    def draw_with_logprobs(logits_RV: torch.Tensor, generators: Any, top_k: Any, top_p: Any) -> tuple[Any, Any]:
        exact_RV, count = log_softmax(logits_RV), logits_RV.shape[1]
        sampled, logprobs_RV = draw(logits_RV, generators, top_k, top_p)
        if logprobs_RV is None or (top_k is None and top_p is None):
            return sampled, None if logprobs_RV is None else exact_RV
        over_all_R = torch.ones(len(exact_RV), dtype=torch.bool, device=exact_RV.device)
        for limit_R, none in ((top_k, count), (top_p, 1)):  # of all requests, as soon as one has a limit
            if limit_R is not None:
                over_all_R &= limit_R >= none
        return sampled, torch.where(over_all_R[:, None], exact_RV, logprobs_RV)

    within.forward = draw_with_logprobs
    sampler.compute_logprobs = log_softmax

"""vLLM for `model.numerics=bitwise`: attention over its cache, and on a GPU log-probs, by the trainer's kernels.

Each token of a step is a request of its own (numerics-6). vLLM's own batch-invariant mode is not used: docs/parity.md
has the reasons.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from goaly.numerics.bitwise_attention import Queries, by_token, write_pages
from goaly.numerics.bitwise_operations import log_softmax


def _queries(step: CommonAttentionMetadata) -> Queries:
    tokens, lengths, pages = step.num_actual_tokens, step.seq_lens, step.block_table_tensor
    if step.max_query_len > 1:
        starts, ends = step.query_start_loc[:-1], step.query_start_loc[1:]
        lengths, pages = by_token(ends, lengths, pages, starts, tokens)
    return Queries(lengths[:tokens].contiguous(), pages[:tokens].contiguous())


class _ByToken:
    """Attends by the kernels of `Queries`."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend over the cache; without a description, as in a warm-up, give zeros."""
        if attn_metadata is None:
            return output.fill_(0)
        own: Any = self
        queries: Queries = attn_metadata.queries
        tokens, (keys, values) = len(queries.lengths_T), own.keys_and_values(kv_cache)
        queries.attend(query[:tokens], keys, values, output[:tokens], own.scale)
        return output


class CpuImplementation(_ByToken, CPUAttentionBackendImpl):
    """Over the cache of vLLM's kernels for CPUs, which has keys and values of a page after each other."""

    def keys_and_values(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Those of the cache."""
        pages, heads, slots, _ = kv_cache.shape
        return kv_cache.view(pages, heads, 2 * slots, -1).chunk(2, dim=2)

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the step's keys and values."""
        keys, values = self.keys_and_values(kv_cache)
        write_pages(key, value, keys, values, slot_mapping)


class GpuImplementation(_ByToken, TritonAttentionImpl):
    """Over the cache of vLLM's Triton kernels, which has keys and values beside each other."""

    def keys_and_values(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Those of the cache."""
        return kv_cache.split(self.head_size, dim=-1)


class CpuBuilder(CPUAttentionMetadataBuilder):
    """Describes a step by its queries."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """The step's tokens as queries."""
        return SimpleNamespace(queries=_queries(common_attn_metadata))


class GpuBuilder(TritonAttentionMetadataBuilder):
    """Describes a step by its queries, beside vLLM's description."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """vLLM's description, and the step's tokens as queries."""
        described: Any = super().build(common_prefix_len, common_attn_metadata, fast_build)
        described.queries = _queries(common_attn_metadata)
        return described


class CpuBackend(CPUAttentionBackend):
    """vLLM's backend, whose kernel gets other requests."""

    get_impl_cls = staticmethod(lambda: CpuImplementation)
    get_builder_cls = staticmethod(lambda: CpuBuilder)


class GpuBackend(TritonAttentionBackend):
    """vLLM's backend, with another kernel."""

    get_impl_cls = staticmethod(lambda: GpuImplementation)
    get_builder_cls = staticmethod(lambda: GpuBuilder)


def use_exact_logprobs(sampler: Any) -> None:
    """Let this sampler of vLLM's first model runner compute log-probs over all tokens as the trainer (train-10)."""
    within = sampler.topk_topp_sampler
    draw = within.forward

    def draw_with_logprobs(logits_RV: Tensor, generators: Any, top_k: Any, top_p: Any) -> tuple[Any, Any]:
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

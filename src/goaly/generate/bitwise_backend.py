"""vLLM's attention on the CPU for `model.numerics=bitwise`: each token of a step is a request of its own (BA-1)."""

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from goaly.models.bitwise_attention import Queries, by_token, write_pages


class BitwiseBackend(CPUAttentionBackend):
    """vLLM's backend, whose kernel gets other requests."""

    @staticmethod
    def get_impl_cls() -> Any:
        """The class that attends."""
        return BitwiseImplementation

    @staticmethod
    def get_builder_cls() -> Any:
        """The class that describes a step."""
        return BitwiseBuilder


class BitwiseBuilder(CPUAttentionMetadataBuilder):
    """Describes a step by its queries."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """The step's tokens as queries."""
        step = common_attn_metadata
        tokens, lengths, pages = step.num_actual_tokens, step.seq_lens, step.block_table_tensor
        if step.max_query_len > 1:
            starts, ends = step.query_start_loc[:-1], step.query_start_loc[1:]
            lengths, pages = by_token(ends, lengths, pages, starts, tokens)
        return Queries(lengths[:tokens].contiguous(), pages[:tokens].contiguous())


class BitwiseImplementation(CPUAttentionBackendImpl):
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
        """Attend over the cache; without a description, as in a warm-up, do nothing."""
        if attn_metadata is not None:
            tokens = len(attn_metadata.lengths_T)
            attn_metadata.attend(query[:tokens], self._pages(kv_cache), output[:tokens], self.scale)
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values."""
        write_pages(key, value, self._pages(kv_cache), slot_mapping, self.head_size)

    def _pages(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The cache with keys and values of a page after each other."""
        pages, heads, slots, _ = kv_cache.shape
        return kv_cache.view(pages, heads, 2 * slots, -1)

"""vLLM's fused CPU kernels for the norms and the rotary embedding of a sampler.

torchtitan writes a norm as six operations and a rotation as sixteen, which take a fifth of a tiny model's decode step.
vLLM's kernels need one each. They round differently in the last bits, so `numerics: bitwise` does not use them. They
keep the rotation's angles in the type of the queries, so bfloat16 does not use them either: torchtitan rotates in
float32.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common import CosSinRoPE, RMSNorm
from vllm import _custom_ops as kernels


class FusedRMSNorm(RMSNorm):
    """RMSNorm by vLLM's kernel. Without gradients."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """torchtitan's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalized input."""
        assert self.eps is not None
        out = torch.empty(x.shape, dtype=x.dtype)
        kernels.rms_norm(out, x.contiguous(), self.weight, self.eps)
        return out


class FusedRoPE(CosSinRoPE):
    """Rotary embedding by vLLM's kernel, in the memory of queries and keys. Without gradients."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """torchtitan's."""

    def _precompute_cache(self) -> torch.Tensor:
        """The cosine and the sine of each angle once, `[positions, dim]`; torchtitan's cache has them twice."""
        cos, sin = super()._precompute_cache().chunk(2, -1)
        half = self.config.dim // 2
        return torch.cat([cos[:, :half], sin[:, :half]], -1).contiguous()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotated queries and keys."""
        assert positions is not None
        tokens = positions.numel()
        of_heads = (tensor.view(tokens, -1) for tensor in (query, key))
        kernels.rotary_embedding(positions.flatten(), *of_heads, query.shape[-1], self.cache, is_neox=True)
        return query, key


def use_fused_kernels(decoder: Any) -> None:
    """Replace these layers in the config of a torchtitan decoder."""
    decoder.norm = _as(FusedRMSNorm, decoder.norm)
    for layer in decoder.layers:
        attention = layer.attention
        layer.attention_norm = _as(FusedRMSNorm, layer.attention_norm)
        layer.ffn_norm = _as(FusedRMSNorm, layer.ffn_norm)
        if getattr(attention, "qk_norm", None) is not None:
            attention.qk_norm = _as(FusedRMSNorm, attention.qk_norm)
        if isinstance(getattr(attention, "rope", None), CosSinRoPE.Config):
            attention.rope = _as(FusedRoPE, attention.rope)


def _as(kind: Any, config: Any) -> Any:
    return kind.Config(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})

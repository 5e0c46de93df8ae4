"""Puts the layers of `model.numerics=bitwise` into torchtitan's definition of a model."""

from typing import Any

from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.linear import Linear

from goaly.models.settings import SLICES
from goaly.models.titan_config import fields_of
from goaly.numerics.bitwise import BitwiseFeedForward, BitwiseLinear
from goaly.numerics.bitwise_experts import BitwiseDispatcher, BitwiseExperts, BitwiseRoutedExperts, BitwiseRouter
from goaly.numerics.kernel_layers import KernelComplexRoPE, KernelRMSNorm, KernelRoPE


def make_bitwise(decoder: Any) -> None:
    """Replace the layers in the config of a torchtitan decoder."""
    decoder.norm = _norm(decoder.norm)
    for layer in decoder.layers:
        attention = layer.attention
        layer.attention_norm, layer.ffn_norm = _norm(layer.attention_norm), _norm(layer.ffn_norm)
        if attention.qk_norm is not None:
            attention.qk_norm = _norm(attention.qk_norm)
        rope = KernelComplexRoPE if isinstance(attention.rope, ComplexRoPE.Config) else KernelRoPE
        attention.rope = rope.Config(**fields_of(attention.rope))
        attention.qkv_linear.wqkv = _layer(attention.qkv_linear.wqkv)
        attention.wo = _layer(attention.wo, SLICES)
        if layer.moe is not None:
            router, routed = layer.moe.router, layer.moe.routed_experts
            layer.moe.router = BitwiseRouter.Config(**fields_of(router) | {"gate": _layer(router.gate)})
            routed.inner_experts = BitwiseExperts.Config(**fields_of(routed.inner_experts))
            routed.token_dispatcher = BitwiseDispatcher.Config(**fields_of(routed.token_dispatcher))
            layer.moe.routed_experts = BitwiseRoutedExperts.Config(**fields_of(routed))
        else:
            network = layer.feed_forward
            linears: dict[str, Any] = {
                "w1": _layer(network.w1),
                "w2": _layer(network.w2, SLICES),
                "w3": _layer(network.w3),
            }
            layer.feed_forward = BitwiseFeedForward.Config(**fields_of(network) | linears)
    decoder.lm_head = _layer(decoder.lm_head)


def _norm(config: Any) -> Any:
    return KernelRMSNorm.Config(**fields_of(config))


def _layer(config: Linear.Config, slices: int = 1) -> BitwiseLinear.Config:
    return BitwiseLinear.Config(**fields_of(config), slices=slices)

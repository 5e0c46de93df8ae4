"""Puts the layers of `model.numerics=bitwise` into torchtitan's definition of a model."""

from typing import Any

from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.linear import Linear

from goaly.models.bitwise import BitwiseFeedForward, BitwiseLinear
from goaly.models.bitwise_experts import BitwiseDispatcher, BitwiseExperts, BitwiseRoutedExperts, BitwiseRouter
from goaly.models.bitwise_gpt_oss import BitwiseClampedExperts
from goaly.models.gpt_oss_layers import ClampedExperts
from goaly.models.kernel_layers import KernelComplexRoPE, KernelRMSNorm, KernelRoPE
from goaly.models.settings import SLICES
from goaly.models.titan_config import fields_of


def make_bitwise(decoder: Any) -> None:
    """Replace the layers in the config of a torchtitan decoder."""
    decoder.norm = _norm(decoder.norm)
    for layer in decoder.layers:
        attention = layer.attention
        layer.attention_norm, layer.ffn_norm = _norm(layer.attention_norm), _norm(layer.ffn_norm)
        if getattr(attention, "qk_norm", None) is not None:
            attention.qk_norm = _norm(attention.qk_norm)
        rope = KernelComplexRoPE if isinstance(attention.rope, ComplexRoPE.Config) else KernelRoPE
        attention.rope = rope.Config(**fields_of(attention.rope))
        qkv = getattr(attention, "qkv_linear", None)
        if qkv is None:
            _make_latents_bitwise(attention)
        else:
            qkv.wqkv = _layer(qkv.wqkv)
        attention.wo = _layer(attention.wo, SLICES)
        if layer.moe is not None:
            router, routed = layer.moe.router, layer.moe.routed_experts
            layer.moe.router = BitwiseRouter.Config(**fields_of(router) | {"gate": _layer(router.gate)})
            routed.inner_experts = _experts(routed.inner_experts)
            routed.token_dispatcher = BitwiseDispatcher.Config(**fields_of(routed.token_dispatcher))
            layer.moe.routed_experts = BitwiseRoutedExperts.Config(**fields_of(routed))
            if layer.moe.shared_experts is not None:
                layer.moe.shared_experts = _network(layer.moe.shared_experts)
        else:
            layer.feed_forward = _network(layer.feed_forward)
    decoder.lm_head = _layer(decoder.lm_head)


def _make_latents_bitwise(attention: Any) -> None:
    """Replace what makes queries, keys and values from latent vectors."""
    for name in ("wq", "wq_a", "wq_b", "wkv_a", "wkv_b"):
        layer = getattr(attention, name)
        setattr(attention, name, None if layer is None else _layer(layer))
    attention.q_norm, attention.kv_norm = _norm(attention.q_norm), _norm(attention.kv_norm)


def _norm(config: Any) -> Any:
    return KernelRMSNorm.Config(**fields_of(config))


def _experts(config: Any) -> Any:
    kinds = {ClampedExperts.Config: BitwiseClampedExperts}
    return kinds.get(type(config), BitwiseExperts).Config(**fields_of(config))


def _network(config: Any) -> BitwiseFeedForward.Config:
    layers: dict[str, Any] = {"w1": _layer(config.w1), "w2": _layer(config.w2, SLICES), "w3": _layer(config.w3)}
    return BitwiseFeedForward.Config(**fields_of(config) | layers)


def _layer(config: Linear.Config, slices: int = 1) -> BitwiseLinear.Config:
    return BitwiseLinear.Config(**fields_of(config), slices=slices)

"""The sizes of a decoder, the names and shapes of its tensors here and in a folder, and its layers in torchtitan.

`Architecture` has what most families share: attention with grouped key heads, gated feed-forward networks, mixtures of
experts. A family (`families/`) is a subclass that says where it differs. torchtitan is imported where a model is built
only.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, ClassVar, NamedTuple

from goaly.weights.layout import Extent

LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""The beginning of a layer's names in a folder."""
EXPERTS_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
"""The names that families and versions of transformers give the number of experts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter, and its dims that parallelism shards."""

    name: str
    shape: Extent
    tp_dim: int | None = None
    """The dim that tensor parallelism shards; None if every rank has the whole parameter."""
    expert: bool = False
    """Whether it is a stack of experts, whose first dim expert parallelism shards."""

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return prod(self.shape)


class Torchtitan(NamedTuple):
    """torchtitan's parts of a family's definition."""

    decoder: Any
    block: Any
    parallelize: Any
    adapter: Any
    """Translates the names and layouts of a folder."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """The parts of a layer that do not depend on the family."""

    norm: Callable[..., Any]
    """Makes the config of a norm of this width."""
    rope: Any
    """The class of the rotary embedding that turns by cosines and sines."""
    inner: Any
    """The config of the layer's inner attention."""
    fuses: bool
    """Whether queries, keys and values have one projection."""
    unset: dict[str, Any]
    """Leaves weights and biases as they are: they come from the folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """The decoder that a `config.json` describes. With experts, `hidden_dim` is that of one expert."""

    family: ClassVar[str]
    rope_types: ClassVar[tuple[str, ...]] = ("default",)
    """Scalings of the rotary embedding."""
    qk_norm: ClassVar[bool] = False
    """Whether queries and keys are normalized."""
    biased: ClassVar[bool] = False
    """Whether linear layers, routers and experts have biases, and heads have sinks."""
    biased_routing: ClassVar[bool] = False
    """Whether experts are chosen by sigmoid scores plus a bias."""
    has_bitwise: ClassVar[bool] = False
    """Whether bitwise numerics have layers for it."""
    has_vllm_naming: ClassVar[bool] = False
    """Whether `vllm_naming` knows the parameters of vLLM's own model of it."""
    has_unloaded_layers: ClassVar[bool] = False
    """Whether folders have more layers, for multi-token prediction."""
    no_adapters: ClassVar[str] = ""
    """Why it cannot have adapters; empty: it can."""
    dequantize: ClassVar[str] = ""
    """How to make a folder without quantization; empty: published folders have none."""

    layers: int
    dim: int
    hidden_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    tied: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] = dataclasses.field(default_factory=dict)
    experts: int = 0
    experts_per_token: int = 0
    normalizes_routing: bool = True
    """Whether the weights of a token's experts add up to 1 before `routing_scale`."""
    routing_scale: float = 1.0
    expert_groups: int | None = None
    """Groups of experts, of which each token chooses `groups_per_token` and then its experts among theirs."""
    groups_per_token: int | None = None
    dense_layers: int = 0
    """The first layers, which have no experts."""
    dense_hidden_dim: int = 0
    shared_hidden_dim: int = 0
    """Hidden dim of the experts that every token has, as one; 0: it has no shared experts."""
    windows: tuple[int, ...] = ()
    """How many tokens each layer attends to, 0 for all; without entries all layers do."""

    @classmethod
    def refused(cls, config: Mapping[str, Any]) -> dict[str, bool]:
        """Keys of the config, and whether its value is one that torchtitan's definition lacks."""
        return {
            "attention_bias": bool(config.get("attention_bias")),
            "mlp_bias": bool(config.get("mlp_bias")),
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "quantization_config": config.get("quantization_config") is not None,
            "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
            "mlp_only_layers": bool(config.get("mlp_only_layers")),
        }

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that the family may have by other names."""
        found = (config[key] for key in EXPERTS_KEYS if config.get(key))
        experts = next(found, 0) if "moe_intermediate_size" in config else 0
        return {
            "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            "hidden_dim": config["moe_intermediate_size" if experts else "intermediate_size"],
            "experts": experts,
            "experts_per_token": config["num_experts_per_tok"] if experts else 0,
            "normalizes_routing": bool(config.get("norm_topk_prob", False)),
        }

    def has_experts(self, layer: int) -> bool:
        """Whether this layer is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def feed_forward_dim(self) -> int:
        """Hidden dim of a layer without experts."""
        return self.dense_hidden_dim or self.hidden_dim

    # Parameters, as torchtitan names them.

    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters; a tied output projection is the embedding, and is not listed."""
        found = [Parameter(name="tok_embeddings.weight", shape=(self.vocab_size, self.dim), tp_dim=0)]
        for layer in range(self.layers):
            prefix = f"layers.{layer}."
            found.extend(self.attention_parameters(f"{prefix}attention."))
            found += [
                Parameter(name=f"{prefix}{name}.weight", shape=(self.dim,)) for name in ("attention_norm", "ffn_norm")
            ]
            if self.has_experts(layer):
                found.extend(self.expert_parameters(f"{prefix}moe."))
            else:
                found.extend(_network(f"{prefix}feed_forward.", self.dim, self.feed_forward_dim))
        found.append(Parameter(name="norm.weight", shape=(self.dim,)))
        if not self.tied:
            found.append(Parameter(name="lm_head.weight", shape=(self.vocab_size, self.dim), tp_dim=0))
        return tuple(found)

    @property
    def elements(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.elements for parameter in self.parameters())

    def attention_parameters(self, prefix: str) -> Iterator[Parameter]:
        """The parameters of a layer's attention."""
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        yield Parameter(name=f"{prefix}qkv_linear.wqkv.weight", shape=(rows, self.dim), tp_dim=0)
        yield Parameter(name=f"{prefix}wo.weight", shape=(self.dim, self.heads * self.head_dim), tp_dim=1)
        if self.qk_norm:
            yield Parameter(name=f"{prefix}q_norm.weight", shape=(self.head_dim,))
            yield Parameter(name=f"{prefix}k_norm.weight", shape=(self.head_dim,))

    def expert_parameters(self, prefix: str) -> Iterator[Parameter]:
        """The parameters of a layer's experts and their router."""
        for name, shape, tp_dim in self.expert_stacks():
            stack, whole = f"{prefix}routed_experts.inner_experts.{name}", (self.experts, *shape)
            yield Parameter(name=stack, shape=whole, tp_dim=tp_dim, expert=True)
        yield Parameter(name=f"{prefix}router.gate.weight", shape=(self.experts, self.dim))
        if self.shared_hidden_dim:
            yield from _network(f"{prefix}shared_experts.", self.dim, self.shared_hidden_dim)

    def expert_stacks(self) -> Iterator[tuple[str, Extent, int | None]]:
        """The stacks of a layer's experts: name, shape of one expert, and the dim that tensor parallelism shards."""
        for name, shape, tp_dim in _projections(self.dim, self.hidden_dim):
            yield f"{name}_{'EDF' if name == 'w2' else 'EFD'}", shape, tp_dim + 1

    def projections(self) -> dict[str, list[Extent]]:
        """The shapes of all weights that adapters can be added to, by the name of the target; the last two dims are
        outputs and inputs."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {
            "q": [(queries, self.dim)] * self.layers,
            "k": [(keys, self.dim)] * self.layers,
            "v": [(keys, self.dim)] * self.layers,
            "o": [(self.dim, queries)] * self.layers,
        }
        sparse = sum(map(self.has_experts, range(self.layers)))
        if dense := self.layers - sparse:
            gate, down, up = (shape for _, shape, _ in _projections(self.dim, self.feed_forward_dim))
            found |= {"gate": [gate] * dense, "up": [up] * dense, "down": [down] * dense}
        if sparse:
            shapes = [(self.experts, *shape) for _, shape, _ in _projections(self.dim, self.hidden_dim)]
            found["experts"] = shapes * sparse
        return found

    # Tensors, as a folder names them.

    def folder_shapes(self) -> Iterator[tuple[str, Extent]]:
        """Names and shapes of a folder's tensors. Families of other layers need not list all of these."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.dim)
        yield "model.norm.weight", (self.dim,)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield f"{prefix}input_layernorm.weight", (self.dim,)
            yield f"{prefix}post_attention_layernorm.weight", (self.dim,)
            yield from self.folder_attention(f"{prefix}self_attn.")
            if self.has_experts(layer):
                yield from self.folder_experts(f"{prefix}mlp.")
            else:
                yield from _folder_network(f"{prefix}mlp.", self.dim, self.feed_forward_dim)
        if not self.tied:
            yield "lm_head.weight", (self.vocab_size, self.dim)

    def folder_attention(self, prefix: str) -> Iterator[tuple[str, Extent]]:
        """Names and shapes of the tensors of a layer's attention."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield f"{prefix}q_proj.weight", (queries, self.dim)
        yield f"{prefix}k_proj.weight", (keys, self.dim)
        yield f"{prefix}v_proj.weight", (keys, self.dim)
        yield f"{prefix}o_proj.weight", (self.dim, queries)
        if self.qk_norm:
            yield f"{prefix}q_norm.weight", (self.head_dim,)
            yield f"{prefix}k_norm.weight", (self.head_dim,)

    def folder_experts(self, prefix: str) -> Iterator[tuple[str, Extent]]:
        """Names and shapes of the tensors of a layer's experts."""
        for number in range(self.experts):
            yield from _folder_network(f"{prefix}experts.{number}.", self.dim, self.hidden_dim)
        if self.shared_hidden_dim:
            yield from _folder_network(f"{prefix}shared_experts.", self.dim, self.shared_hidden_dim)
        yield f"{prefix}gate.weight", (self.experts, self.dim)
        if self.biased_routing:
            yield f"{prefix}gate.e_score_correction_bias", (self.experts,)

    # Layers, as torchtitan builds them.

    def torchtitan(self) -> Torchtitan:
        """torchtitan's parts of the definition."""
        raise NotImplementedError

    def rope(self, parts: LayerParts) -> Any:
        """The config of the rotary embedding."""
        return parts.rope.Config(dim=self.head_dim, max_seq_len=self.max_context, theta=self.rope_theta)

    def attention(self, layer: int, parts: LayerParts) -> Any:
        """The config of a layer's attention."""
        from torchtitan.models.common.config_utils import make_gqa_config

        return make_gqa_config(
            dim=self.dim,
            n_heads=self.heads,
            n_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            wqkv_param_init=parts.unset,
            wo_param_init=parts.unset,
            inner_attention=parts.inner,
            fuse_qkv=parts.fuses,
            rope=self.rope(parts),
            qk_norm=parts.norm(self.head_dim) if self.qk_norm else None,
        )

    def softmax_scale(self, attention: Any) -> float:
        """The factor by which this attention multiplies scores."""
        return self.head_dim**-0.5

    def inner_experts(self, parts: LayerParts) -> Any:
        """The config of a layer's experts, without their router."""
        from goaly.numerics.experts import Experts

        stacks = dict.fromkeys((name for name, _, _ in self.expert_stacks()), parts.unset["weight"])
        return Experts.Config(dim=self.dim, hidden_dim=self.hidden_dim, num_experts=self.experts, param_init=stacks)


def _network(prefix: str, dim: int, hidden_dim: int) -> Iterator[Parameter]:
    for name, shape, tp_dim in _projections(dim, hidden_dim):
        yield Parameter(name=f"{prefix}{name}.weight", shape=shape, tp_dim=tp_dim)


def _projections(dim: int, hidden_dim: int) -> tuple[tuple[str, Extent, int], ...]:
    """Gate, down and up projection: name, shape, and the dim of `hidden_dim`."""
    inner, outer = (hidden_dim, dim), (dim, hidden_dim)
    return ("w1", inner, 0), ("w2", outer, 1), ("w3", inner, 0)


def _folder_network(prefix: str, dim: int, hidden_dim: int) -> Iterator[tuple[str, Extent]]:
    yield f"{prefix}gate_proj.weight", (hidden_dim, dim)
    yield f"{prefix}up_proj.weight", (hidden_dim, dim)
    yield f"{prefix}down_proj.weight", (dim, hidden_dim)

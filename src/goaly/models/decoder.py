"""The sizes of a decoder, and the names and shapes of its parameters in torchtitan's definition. Builds no model."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from goaly.weights.layout import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The sizes of multi-head latent attention, where keys and values are made from a latent vector for each token."""

    rank: int
    """Width of the latent vector of keys and values."""
    query_rank: int
    """Width of that of queries; 0: they are made from the hidden state itself."""
    plain_dim: int
    """The part of a query head without rotation."""
    rotated_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        """The width of a query or key head."""
        return self.plain_dim + self.rotated_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes that determine a decoder's shapes. With experts, `hidden_dim` is that of one expert."""

    layers: int
    dim: int
    hidden_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    experts: int = 0
    qk_norm: bool = True
    tied: bool = False
    latent: Latent | None = None
    biased: bool = False
    """Whether linear layers, routers and experts have biases, heads have sinks, and an expert's gate and up projection
    are one matrix, as gpt-oss's."""
    dense_layers: int = 0
    """The first layers, which have no experts."""
    dense_hidden_dim: int = 0
    shared_hidden_dim: int = 0
    """Hidden dim of the experts that every token has, as one; 0: it has no shared experts."""

    def has_experts(self, layer: int) -> bool:
        """Whether this layer is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters; a tied output projection is the embedding, and is not listed."""
        found = [Parameter(name="tok_embeddings.weight", shape=(self.vocab_size, self.dim), tp_dim=0)]
        for layer in range(self.layers):
            prefix = f"layers.{layer}."
            found.extend(self._latent_attention(prefix, self.latent) if self.latent else self._attention(prefix))
            if self.biased:
                found.append(Parameter(name=f"{prefix}attention.sinks", shape=(self.heads,), tp_dim=0))
            found += [
                Parameter(name=f"{prefix}{name}.weight", shape=(self.dim,)) for name in ("attention_norm", "ffn_norm")
            ]
            if self.has_experts(layer):
                found.extend(self._experts(f"{prefix}moe."))
            else:
                found.extend(_mlp(f"{prefix}feed_forward.", self.dim, self.dense_hidden_dim or self.hidden_dim))
        found.append(Parameter(name="norm.weight", shape=(self.dim,)))
        if not self.tied:
            found.append(Parameter(name="lm_head.weight", shape=(self.vocab_size, self.dim), tp_dim=0))
        return tuple(found)

    @property
    def elements(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.elements for parameter in self.parameters())

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
            gate, down, up = (shape for _, shape, _ in _projections(self.dim, self.dense_hidden_dim or self.hidden_dim))
            found |= {"gate": [gate] * dense, "up": [up] * dense, "down": [down] * dense}
        if sparse:
            shapes = [(self.experts, *shape) for _, shape, _ in _projections(self.dim, self.hidden_dim)]
            found["experts"] = shapes * sparse
        return found

    def _attention(self, prefix: str) -> Iterator[Parameter]:
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = f"{prefix}attention."
        yield Parameter(name=f"{attention}qkv_linear.wqkv.weight", shape=(rows, self.dim), tp_dim=0)
        if self.biased:
            yield Parameter(name=f"{attention}qkv_linear.wqkv.bias", shape=(rows,), tp_dim=0)
            yield Parameter(name=f"{attention}wo.bias", shape=(self.dim,))
        yield Parameter(name=f"{attention}wo.weight", shape=(self.dim, self.heads * self.head_dim), tp_dim=1)
        if self.qk_norm:
            yield Parameter(name=f"{attention}q_norm.weight", shape=(self.head_dim,))
            yield Parameter(name=f"{attention}k_norm.weight", shape=(self.head_dim,))

    def _latent_attention(self, prefix: str, latent: Latent) -> Iterator[Parameter]:
        attention, queries = f"{prefix}attention.", self.heads * latent.head_dim
        if latent.query_rank:
            yield Parameter(name=f"{attention}wq_a.weight", shape=(latent.query_rank, self.dim))
            yield Parameter(name=f"{attention}q_norm.weight", shape=(latent.query_rank,))
            yield Parameter(name=f"{attention}wq_b.weight", shape=(queries, latent.query_rank), tp_dim=0)
        else:
            yield Parameter(name=f"{attention}wq.weight", shape=(queries, self.dim), tp_dim=0)
        made = self.heads * (latent.plain_dim + latent.value_dim)
        yield Parameter(name=f"{attention}wkv_a.weight", shape=(latent.rank + latent.rotated_dim, self.dim))
        yield Parameter(name=f"{attention}kv_norm.weight", shape=(latent.rank,))
        yield Parameter(name=f"{attention}wkv_b.weight", shape=(made, latent.rank), tp_dim=0)
        yield Parameter(name=f"{attention}wo.weight", shape=(self.dim, self.heads * latent.value_dim), tp_dim=1)

    def _experts(self, prefix: str) -> Iterator[Parameter]:
        stacks: list[tuple[str, Extent, int | None]] = [
            (f"{name}_{'EDF' if name == 'w2' else 'EFD'}", shape, tp_dim + 1)
            for name, shape, tp_dim in _projections(self.dim, self.hidden_dim)
        ]
        if self.biased:
            both = 2 * self.hidden_dim
            stacks = [("mlp1_weight_EGD", (both, self.dim), 1), ("mlp1_bias_EG", (both,), 1)]
            stacks += [("mlp2_weight_EDF", (self.dim, self.hidden_dim), 2), ("mlp2_bias_ED", (self.dim,), None)]
            yield Parameter(name=f"{prefix}router.gate.bias", shape=(self.experts,))
        for name, shape, tp_dim in stacks:
            yield Parameter(
                name=f"{prefix}routed_experts.inner_experts.{name}",
                shape=(self.experts, *shape),
                tp_dim=tp_dim,
                expert=True,
            )
        yield Parameter(name=f"{prefix}router.gate.weight", shape=(self.experts, self.dim))
        if self.shared_hidden_dim:
            yield from _mlp(f"{prefix}shared_experts.", self.dim, self.shared_hidden_dim)


def _mlp(prefix: str, dim: int, hidden_dim: int) -> Iterator[Parameter]:
    for name, shape, tp_dim in _projections(dim, hidden_dim):
        yield Parameter(name=f"{prefix}{name}.weight", shape=shape, tp_dim=tp_dim)


def _projections(dim: int, hidden_dim: int) -> tuple[tuple[str, Extent, int], ...]:
    """Gate, down and up projection: name, shape, and the dim of `hidden_dim`."""
    inner, outer = (hidden_dim, dim), (dim, hidden_dim)
    return ("w1", inner, 0), ("w2", outer, 1), ("w3", inner, 0)

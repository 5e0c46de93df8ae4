"""torchtitan's model definition as a model class inside vLLM, on CPU and CUDA.

The class builds the modules that the trainer trains (`models/definition.py` reads them from the Hugging Face folder),
with vLLM's paged attention as their inner attention. Parameters have torchtitan's names, and their live tensors can be
overwritten between two decode steps. Import it after `prepare_torchtitan` of `models/device.py`.

vLLM refuses the model if a parameter was not loaded from the folder, except for adapters, which are 0 until the first
update. With tp > 1 a rank holds exactly the slices that `named_tensors` declares, which weight updates fill.

Shape suffixes: T tokens of a step, B = 1, L = T, N heads, H head dim, D model dim, V vocabulary.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.protocols.module import Module
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import ModelRegistry

from goaly.generate.divided_model import add_parts_by, divided_on_meta, split_dim
from goaly.generate.expert_choices import RECORDS_CHOICES, ChoiceCache
from goaly.models.architecture import LAYER, Architecture
from goaly.models.attention import share_angles, widened
from goaly.models.definition import folder_tensors, layer_adapter, model_spec, versioned_tensors
from goaly.models.families import architecture, read_config
from goaly.models.lora import BASE, note_base
from goaly.models.settings import LoraSettings, Numerics
from goaly.numerics.cpu_sampling import use_fused_kernels

ARCHITECTURES: dict[Numerics, str] = {
    "fast": "GoalyTorchtitanForCausalLM",
    "bitwise": "GoalyBitwiseForCausalLM",
}
LORA = "lora"
"""The key of vLLM's `additional_config` that has the fields of `LoraSettings`, if the model has adapters."""
_FUSED = re.compile(r"(?<=qkv_linear\.)w[qkv](?=\.(weight|bias)$)")


def register() -> None:
    """Register the classes with vLLM. An engine uses one with `hf_overrides={"architectures": [ARCHITECTURES[…]]}`."""
    ModelRegistry.register_model(ARCHITECTURES["fast"], TorchtitanForCausalLM)
    ModelRegistry.register_model(ARCHITECTURES["bitwise"], BitwiseForCausalLM)


class PagedAttention(Module):
    """torchtitan's inner attention over vLLM's paged KV cache."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """A layer's heads over all tensor-parallel ranks. `_fill_in_heads` sets them for each layer."""

        layer: int = 0
        heads: int = 0
        kv_heads: int = 0
        head_dim: int = 0
        scale: float = 0.0
        window_size: tuple[int, int] = (-1, 0)
        """As torchtitan's: how many earlier tokens are seen (-1: all), and how many later ones."""
        sinks: bool = False
        numerics: Numerics = "fast"

    def __init__(self, config: Config):
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        # vLLM's kernels for sinks must be chosen here; the layer's parameter takes this one's place.
        sinks: dict[str, Any] = {"sinks": torch.empty(config.heads // tp)} if config.sinks else {}
        self.paged = Attention(
            num_heads=config.heads // tp,
            head_size=config.head_dim,
            scale=config.scale,
            num_kv_heads=config.kv_heads // tp,
            cache_config=get_current_vllm_config().cache_config,
            prefix=f"layers.{config.layer}.attention.inner_attention",  # must be unique: vLLM finds the KV cache by it
            attn_backend=_bitwise_backend() if config.numerics == "bitwise" else None,  # None: vLLM's own
            per_layer_sliding_window=config.window_size[0] + 1 or None,
            **sinks,
        )

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend over this step's tokens and the cache; lengths come from vLLM's forward context. The mask is the
        number of tokens; those after it are padding."""
        tokens, width = attention_masks, v_BLNH.shape[-1]
        v_BLNH = widened(v_BLNH, q_BLNH.shape[-1])
        # A kernel that writes the cache knows the distance of tokens only, not that of heads.
        out_TD = self.paged(*(one.flatten(0, 1)[:tokens].contiguous() for one in (q_BLNH, k_BLNH, v_BLNH)))
        if len(out_TD) < q_BLNH.shape[1]:
            out_TD = pad(out_TD, (0, 0, 0, q_BLNH.shape[1] - len(out_TD)))
        return out_TD.view(q_BLNH.shape)[..., :width]


class TorchtitanForCausalLM(torch.nn.Module):
    """vLLM's interface of a model around a torchtitan decoder."""

    is_text_generation_model = True
    numerics: ClassVar[Numerics] = "fast"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        folder = vllm_config.model_config.model
        self._tp = vllm_config.parallel_config.tensor_parallel_size
        additional: Any = vllm_config.additional_config
        fields = additional.get(LORA)
        self._lora = None if fields is None else LoraSettings(**fields)
        attention = PagedAttention.Config(numerics=self.numerics)
        spec = model_spec(folder, attention=attention, numerics=self.numerics, lora=self._lora)
        config = spec.model
        shape = architecture(read_config(folder))
        _fill_in_heads(config, shape)
        device: Any = vllm_config.device_config.device
        if device.type == "cpu" and self.numerics == "fast" and vllm_config.model_config.dtype == torch.float32:
            use_fused_kernels(config)
        self._layers = shape.layers
        self._adapter = layer_adapter(spec, folder)
        self.choices: ChoiceCache | None = None
        """The experts that were chosen for the tokens in the key-value cache, if they are recorded."""
        self._row_multiple: Callable[[], int] | None = None
        if self.numerics == "bitwise" and device.type == "cpu":
            from goaly.numerics.bitwise_operations import row_multiple

            self._row_multiple = row_multiple
        self.model, self._dims = divided_on_meta(
            spec,
            self._tp,
            get_tensor_model_parallel_rank(),
            divides_experts=vllm_config.parallel_config.enable_expert_parallel,
            numerics=self.numerics,
        )
        context: Any = nullcontext
        if self._dims is not None:
            context = get_spmd_context(parallel_dims=self._dims)
            add_parts_by(self.model, tensor_model_parallel_all_reduce)
        self._packs = [one.pack for one in self.model.modules() if hasattr(one, "pack")]
        if RECORDS_CHOICES in additional:
            self.choices = ChoiceCache(
                [layer.moe for layer in self.model.layers.values() if layer.moe_enabled], vllm_config
            )
        self.model.to_empty(device=device)
        with torch.no_grad(), context():
            self.model.init_weights(buffer_device=None)
            share_angles(self.model)
            for module in self.model.modules():
                if isinstance(module, PagedAttention):
                    for scale in module.buffers():
                        scale.fill_(1.0)  # vLLM's default, which `to_empty` erased
            if shape.biased:
                for layer in self.model.layers.values():
                    layer.attention.inner_attention.paged.impl.sinks = layer.attention.sinks

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings `[T, D]`."""
        return self.model.tok_embeddings(input_ids)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors: Any = None, **_: Any
    ) -> torch.Tensor:
        """Hidden states `[T, D]` of this step's tokens."""
        tokens = len(input_ids)
        if self._row_multiple is not None and (rest := -tokens % self._row_multiple()):
            input_ids, positions = pad(input_ids, (0, rest)), pad(positions, (0, rest))
        positions_BL = positions.unsqueeze(0)
        hidden_BLD = self.model.tok_embeddings(input_ids.unsqueeze(0))
        for layer in self.model.layers.values():
            hidden_BLD = layer(hidden_BLD, tokens, positions_BL)
        hidden_TD = self.model.norm(hidden_BLD).squeeze(0)[:tokens]
        if self.choices is not None:
            self.choices.write(tokens)
        return hidden_TD

    def compute_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Logits `[T, V]` over the whole vocabulary."""
        logits_TV = self.model.lm_head(hidden_TD)
        return logits_TV if self._dims is None else tensor_model_parallel_all_gather(logits_TV)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the parameters from Hugging Face's names, a layer at a time; returns the names that were filled."""
        by_layer: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in weights:  # mapped from the files
            layer = LAYER.match(name)
            if layer and int(layer[1]) >= self._layers:
                continue  # of multi-token prediction
            by_layer.setdefault(layer[0] if layer else "", {})[name] = tensor
        held = folder_tensors(self.model)
        unfilled = set(held)
        for of_layer in by_layer.values():
            full = self._adapter.from_hf(of_layer)
            local = {name: self._local(name, tensor) for name, tensor in full.items()} if self._dims else full
            unfilled &= set(self.model.load_state_dict(local, strict=False).missing_keys)
        if self._lora is not None:
            held |= versioned_tensors(self.model)  # they are 0, so that vLLM's own check finds every parameter filled
            note_base(self.model, self._placed(folder_tensors(self.model)))
        self.weights_changed()
        return {f"model.{name}" for name in held if name not in unfilled}

    def weights_changed(self) -> None:
        """Pack the parameters again, after they were overwritten."""
        for pack in self._packs:
            pack()

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """The live parameters that weight updates fill, by torchtitan's names. With tp > 1 they are DTensors in the
        parameters' memory."""
        return self._placed(versioned_tensors(self.model))

    def _placed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """These tensors of the model, with tp > 1 as DTensors."""
        if self._dims is None:
            return {name: tensor.detach() for name, tensor in tensors.items()}
        mesh = self._dims.get_mesh("tp")
        placements = {name: None if name == BASE else split_dim(self.model, name) for name in tensors}
        return {
            name: DTensor.from_local(
                tensors[name].detach(), mesh, [Replicate() if dim is None else Shard(dim)], run_check=False
            )
            for name, dim in placements.items()
        }

    def _local(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a whole tensor."""
        dim = split_dim(self.model, _FUSED.sub("wqkv", name) if self._lora is None else name)
        if dim is None:
            return full
        if full.shape[dim] % self._tp:
            raise ValueError(f"generator.tp={self._tp}: must divide dimension {dim} of {name}, {tuple(full.shape)}")
        return full.chunk(self._tp, dim)[get_tensor_model_parallel_rank()]


class BitwiseForCausalLM(TorchtitanForCausalLM):
    """The same with `model.numerics=bitwise`."""

    numerics = "bitwise"


def _bitwise_backend() -> Any:
    from goaly.numerics.bitwise_backend import CpuBackend, GpuBackend

    return CpuBackend if get_current_vllm_config().device_config.device_type == "cpu" else GpuBackend


def _fill_in_heads(config: Any, shape: Architecture) -> None:
    for index, layer in enumerate(config.layers):
        inner = layer.attention.inner_attention
        inner.layer = index
        inner.heads, inner.kv_heads, inner.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        inner.sinks = shape.biased
        inner.scale = shape.softmax_scale(layer.attention)

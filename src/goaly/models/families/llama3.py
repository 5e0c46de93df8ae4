"""Llama 3."""

import dataclasses
from typing import Any

from goaly.models.architecture import Architecture, LayerParts, Torchtitan


class Llama3(Architecture):
    """The plain decoder, with the scaling of rotary embeddings that Llama 3.1 has."""

    family = "llama3"
    rope_types = ("default", "llama3")
    has_bitwise = True

    def torchtitan(self) -> Torchtitan:
        from torchtitan.models.llama3 import Llama3Model, parallelize_llama
        from torchtitan.models.llama3.model import Llama3TransformerBlock
        from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

        return Torchtitan(Llama3Model.Config, Llama3TransformerBlock.Config, parallelize_llama, Llama3StateDictAdapter)

    def rope(self, parts: LayerParts) -> Any:
        from torchtitan.models.common import ComplexRoPE

        rope = ComplexRoPE.Config(dim=self.head_dim, max_seq_len=self.max_context, theta=self.rope_theta)
        if not self.rope_scaling:
            return rope
        return dataclasses.replace(
            rope,
            scaling="llama",
            scaling_factor=self.rope_scaling["factor"],
            low_freq_factor=self.rope_scaling["low_freq_factor"],
            high_freq_factor=self.rope_scaling["high_freq_factor"],
            original_max_position_embeddings=self.rope_scaling["original_max_position_embeddings"],
        )

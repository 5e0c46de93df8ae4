"""Qwen3, dense and with experts in every layer."""

from goaly.models.architecture import Architecture, Torchtitan


class Qwen3(Architecture):
    """Llama's layers with norms of queries and keys, and with experts or without."""

    family = "qwen3"
    qk_norm = True
    has_bitwise = True
    has_vllm_naming = True

    def torchtitan(self) -> Torchtitan:
        from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
        from torchtitan.models.qwen3.model import Qwen3TransformerBlock
        from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

        return Torchtitan(Qwen3Model.Config, Qwen3TransformerBlock.Config, parallelize_qwen3, Qwen3StateDictAdapter)

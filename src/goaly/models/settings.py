"""Which model is trained and sampled."""

from pathlib import Path
from typing import Literal

from goaly.config.settings import settings


@settings
class ModelSettings:
    """The model that trainer, generator and reference share at the start."""

    path: str = ""
    """A Hugging Face folder: config.json, safetensors, tokenizer files. Families: Qwen3 (dense) and Llama 3."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the model's computations. In bfloat16 the trainer keeps float32 parameters and casts them for
    each pass; a reference keeps bfloat16 ones, and weights travel as bfloat16 (`weights.transfer_dtype`)."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that cannot work. `prefix` is the section's path with its dot, such as `model.`."""
        if not self.path:
            return [f"{prefix}path: is not set, must be a Hugging Face folder"]
        if not (Path(self.path) / "config.json").is_file():
            return [f"{prefix}path={self.path}: has no config.json, must be a Hugging Face folder"]
        return []

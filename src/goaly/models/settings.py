"""Which model is trained and sampled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from goaly.config.settings import Section, Settings


class ModelSettings(Settings):
    """The model that trainer, generator and reference share at the start."""

    path: str = ""
    """A Hugging Face folder: config.json, safetensors, tokenizer files. Families: Qwen3, dense or
    with experts, and Llama 3."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the model's computations. In bfloat16 the trainer keeps float32 parameters and casts them for
    each pass; a reference keeps bfloat16 ones, and weights travel as bfloat16 (`weights.transfer_dtype`)."""

    def _problems(self, at: Section) -> Iterator[str]:
        yield from folder_problems(self.path, at)


def folder_problems(path: str | None, at: Section) -> Iterator[str]:
    """One line if `at.path` is not a model's folder; null is none."""
    if path == "":
        yield f"{at}path: is not set, must be a Hugging Face folder"
    elif path is not None and not (Path(path) / "config.json").is_file():
        yield f"{at.path}: has no config.json, must be a Hugging Face folder"

"""Attention on GPUs, as far as a machine without one can show."""

from typing import Any

import pytest
import torch
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.tools import utils

from goaly.models.attention import BuiltInVarlenAttention, inner_attention
from goaly.models.context_attention import ContextVarlenAttention


@pytest.mark.parametrize(
    "config",
    [inner_attention("cuda"), inner_attention("cuda", sinks=True), ContextVarlenAttention.Config()],
    ids=["plain", "sinks", "context"],
)
def test_a_recent_gpu_needs_no_package_of_newer_kernels(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan asks for them there, and their module is not installed."""
    monkeypatch.setattr(utils, "get_cuda_flash_attention_impl", lambda: "FA3")
    assert config.build().window_size == config.window_size


def test_the_kernel_gets_one_width_and_what_was_added_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def kernel(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        given.extend([q, k, v])
        return v

    monkeypatch.setattr(VarlenAttention, "forward", kernel)
    q, v = torch.randn(1, 5, 2, 12), torch.randn(1, 5, 2, 8)
    out = BuiltInVarlenAttention.Config().build()(q, q, v)
    assert torch.equal(out, v)
    assert [one.shape[-1] for one in given] == [12, 12, 12]

"""Runs the check of bitwise operations on a CPU, in Triton's interpreter: with the kernels, and with one that is wrong.

TRITON_INTERPRET=1 python -m tests.unit.benchmarks.gpu_operations_in_interpreter OUT
"""

import sys

import pytest
import torch

from bench import gpu_bitwise
from goaly.numerics import bitwise_kernels
from tests.unit.numerics.kernels_in_interpreter import write_false

COSTS = {"product_cost", "product_cost_of_8", "norm_cost", "log_softmax_cost", "attention_cost"}
SIZES = gpu_bitwise.Sizes(
    tokens=70, width=32, outputs=40, vocabulary=50, experts=3, heads=2, kv_heads=1, head_dim=16, context=20
)


def operations() -> dict[str, float]:
    """What the check finds."""
    return gpu_bitwise.operations(SIZES, torch.float32, torch.device("cpu"))


def the_check_passes_and_has_the_cost_of_each_operation() -> None:
    """The kernels as they are."""
    assert operations().keys() >= COSTS


def rows_that_depend_on_the_number_of_rows_fail_the_check() -> None:
    """A norm of other bits among other rows."""
    whole = bitwise_kernels.normalized
    bitwise_kernels.normalized = lambda x, weight, eps: whole(x, weight, eps) * (1 + len(x) * 1e-6)
    with pytest.raises(AssertionError, match="norm: rows 0 to 1 have other bits alone"):
        operations()


if __name__ == "__main__":
    gpu_bitwise.COUNTS, gpu_bitwise.STARTS = (1, 65), (0, 3)
    write_false(
        (
            the_check_passes_and_has_the_cost_of_each_operation,
            rows_that_depend_on_the_number_of_rows_fail_the_check,
        ),
        sys.argv[1],
    )

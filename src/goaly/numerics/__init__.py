"""How forward passes compute: equal bits on both sides, and kernels for CPUs, behind the functions that a GPU uses."""

SLICES = 2
"""Parts in which bitwise numerics sum over features that tensor-parallel ranks divide: the most ranks there can be."""
KERNEL_WIDTH = 32
"""vLLM's kernel of experts on CPUs has widths that are multiples of it."""

"""How forward passes compute: equal bits on both sides, and kernels for CPUs, behind the functions that a GPU uses."""

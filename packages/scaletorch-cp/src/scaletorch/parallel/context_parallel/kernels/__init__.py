"""Attention over one block of keys, by the kernel that suits it, and the merge of blocks."""

from .merge import merge_into, statistics_dtype, update_out_and_lse
from .operands import Operands
from .table import KERNELS, Kernel, backward, forward, kernel_for

__all__ = [
    "KERNELS",
    "Kernel",
    "Operands",
    "backward",
    "forward",
    "kernel_for",
    "merge_into",
    "statistics_dtype",
    "update_out_and_lse",
]

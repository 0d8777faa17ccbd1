"""Kernels for attention over one block of keys, and the merge of blocks."""

from .block import Kernel, Operands, merge_into, statistics_dtype, update_out_and_lse
from .table import KERNELS, backward, forward, kernel_for

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

"""How far rounding takes a number, and from where on nobody can tell it from a fault.

An addition is off by at most half an epsilon of the sum so far, up or down. Errors of either sign
add up as a random walk does: n additions of like terms come to about epsilon x sqrt(n) of the sum,
and parts of a computation that follow one another add their squares, the steps of a training too.
So the root of all additions between inputs and result counts, not their number (N. J. Higham,
T. Mary, A new approach to probabilistic rounding error analysis, 2019).
"""

from __future__ import annotations

import math

import torch

from ..compose.summation import ROOM

LARGEST = 1e-3  # a larger bound would let bfloat16 pass for float32: its rounding is 1e-3 and more


def bound(dtype: torch.dtype, chain: int, step: int) -> float:
    """Return the largest relative error that rounding explains.

    Args:
        dtype: Of the model.
        chain: Additions, see `chain_length`.
        step: 0-based; what a step's weights are off by enters the next.
    """
    return torch.finfo(dtype).eps * ROOM * math.sqrt(chain * (step + 1))


def blind(dtype: torch.dtype, chain: int, steps: int) -> str:
    """Say why no fault could be told from rounding in a dtype, or '' if one can.

    bfloat16 goes by what one process loses instead; see `lost`.
    """
    if dtype == torch.bfloat16:
        return ""
    last = bound(dtype, chain, steps - 1)
    if last <= LARGEST:
        return ""
    return (
        f"rounding of {chain} additions in {str(dtype).removeprefix('torch.')} may come to "
        f"{last:.1e} in {steps} steps, and beyond {LARGEST:.0e} a fault could pass for it: verify "
        "float64, or the same model with smaller sizes"
    )

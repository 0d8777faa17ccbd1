"""Measurements of a sharded Llama block; every rank runs the same."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletorch.models.llama import Block, LlamaConfig, rotary_tables

from ..harness.checks import check
from ..harness.costs import BOUNDS, DTYPES, Figures, alone, measured
from ..harness.turns import Run
from .ways import NORMS, WAYS, Finish, nothing

HEAD_DIM = 64


@dataclass(frozen=True)
class Size:
    """A problem."""

    hidden: int
    batch: int
    length: int
    dtype: str

    def formula(self, sequence: bool) -> int:
        """Return the bytes that each of two ranks has to send."""
        tokens, norms = self.batch * self.length, len(NORMS) if sequence else 0
        return (4 * tokens + norms) * self.hidden * DTYPES[self.dtype].itemsize


def make(size: Size) -> Block:
    """Return the full block, the same on every rank."""
    torch.manual_seed(0)
    heads = size.hidden // HEAD_DIM
    config = LlamaConfig(
        hidden_size=size.hidden, intermediate_size=size.hidden * 3, num_heads=heads,
        num_kv_heads=heads,
    )  # fmt: skip
    return Block(config).to(DTYPES[size.dtype])


def own_share(x: Tensor) -> Tensor:
    """Return this rank's shard of a sequence [B, L, H]."""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def step(
    block: nn.Module, x: Tensor, tables: tuple[Tensor, Tensor], finish: Finish = nothing
) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return the output and the input's gradient, shaped as `x`.

    Args:
        block: The block.
        x: Hidden states [B, L, H], or this rank's sequence shard.
        tables: Tables of the rotary embedding.
        finish: Called with the block after backward.
    """
    x = x.detach().requires_grad_()
    out = block(x, *tables)
    out.sum().backward()
    finish(block)
    for parameter in block.parameters():
        parameter.grad = None
    return out.detach(), torch.as_tensor(x.grad)


def prepare(size: Size) -> dict[str, Run]:
    """Return each way's step, after a check of its results."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size.batch, size.length, size.hidden, generator=generator)
    x = x.to(DTYPES[size.dtype])
    tables = rotary_tables(torch.arange(size.length)[None], HEAD_DIM, 1e4, torch.float32)
    whole = make(size)
    in_one = partial(step, whole, x, tables)
    expected, runs = in_one(), {}
    for name, way in WAYS.items():
        change = own_share if way.sequence else Tensor.contiguous
        block = way.divide(copy.deepcopy(whole))
        runs[name] = partial(step, block, change(x), tables, way.finish)
        check(name, runs[name](), tuple(map(change, expected)), BOUNDS[size.dtype])
    return runs | alone(in_one)


def measure(size: Size, budget: float) -> dict[str, Figures]:
    """Measure every way on this rank, for about `budget` seconds each."""
    return measured(prepare(size), budget)

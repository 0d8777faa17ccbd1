"""A Llama block over two ranks: ours, torch's DTensor plan, and linear layers written by hand.

Forward and backward of one block on two ranks of one thread each. The floor is the least that any
library must do: plain ``F.linear`` on shards, one ``all_reduce`` after each half of the block in
forward and one for each in backward, by two autograd functions. All ways run in the same
processes, one step of each in turn; medians are printed, with their ratio to the floor, and the
bytes that each rank hands to all_reduce against the formula 4 x tokens x hidden x element size.

    python benchmarks/tensor_parallel.py --hidden 512 1024 --tokens 1x8 1x64 1x512 4x256
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from scaletorch.dist import RankPool
from scaletorch.models.llama import Block, LlamaConfig, rotary_tables
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel

HEAD_DIM = 64
PLAN = {
    **{f"self_attn.{name}_proj": "column" for name in "qkv"},
    "self_attn.o_proj": "row",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Enter(torch.autograd.Function):
    """Identity forward, all_reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Sum the gradient over the ranks."""
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """all_reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the sum of every rank's ``x``."""
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Hand the gradient on."""
        return grads[0]


class Surrounded(nn.Module):
    """A half of the block written by hand: its input enters, its output leaves."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        """Run the half on shards."""
        inner: Any = self.inner
        out: Tensor = Leave.apply(inner(Enter.apply(x), *rest))  # type: ignore[no-untyped-call]
        return out


def divide(block: Block, world_size: int) -> None:
    """Give the attention of this rank its share of the heads."""
    block.self_attn.num_heads //= world_size
    block.self_attn.num_kv_heads //= world_size


def by_hand(block: Block) -> nn.Module:
    """Cut every weight by hand."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, style in PLAN.items():
        layer: Any = block.get_submodule(name)
        shard = layer.weight.detach().chunk(world_size, 0 if style == "column" else 1)[rank]
        layer.weight = nn.Parameter(shard.contiguous())
    divide(block, world_size)
    block.self_attn = Surrounded(block.self_attn)  # type: ignore[assignment]
    block.mlp = Surrounded(block.mlp)  # type: ignore[assignment]
    return block


def ours(block: Block) -> nn.Module:
    """Apply a plan."""
    apply_tensor_parallel(block, PLAN, dist.group.WORLD)
    divide(block, dist.get_world_size())
    return block


def dtensor(block: Block) -> nn.Module:
    """Apply torch's plan."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    plan = {name: styles[style]() for name, style in PLAN.items()}
    divide(block, dist.get_world_size())
    return parallelize_module(block, mesh, plan)


WAYS: dict[str, Callable[[Block], nn.Module]] = {
    "by hand": by_hand,
    "scaletorch": ours,
    "DTensor": dtensor,
}


def make(hidden: int, dtype: torch.dtype) -> Block:
    """Return the whole block, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 3, num_heads=hidden // HEAD_DIM,
        num_kv_heads=hidden // HEAD_DIM,
    )  # fmt: skip
    return Block(config).to(dtype)


def step(block: nn.Module, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return the output and the input's gradient."""
    x = x.detach().requires_grad_()
    out = block(x, *tables)
    out.sum().backward()
    for parameter in block.parameters():
        parameter.grad = None
    return out.detach(), torch.as_tensor(x.grad)


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call, from when all ranks are there."""
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def counted(run: Callable[[], object]) -> int:
    """Return the bytes that a call hands to all_reduce."""
    own, sent = dist.all_reduce, 0

    def count(data: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += data.numel() * data.element_size()
        return own(data, *args, **kwargs)

    dist.all_reduce = count  # type: ignore[assignment]
    try:
        run()
    finally:
        dist.all_reduce = own
    return sent


def measure(
    hidden: int, tokens: tuple[int, int], dtype_name: str, repeats: int
) -> dict[str, tuple[list[float], int]]:
    """Return each way's seconds and bytes on this rank."""
    dtype = DTYPES[dtype_name]
    batch, length = tokens
    x = torch.randn(batch, length, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    tables = rotary_tables(torch.arange(length)[None], HEAD_DIM, 1e4, torch.float32)
    whole = make(hidden, dtype)
    blocks = {name: way(copy.deepcopy(whole)) for name, way in WAYS.items()}
    bound = 1e-4 if dtype == torch.float32 else 1e-1
    expected = step(whole, x, tables)
    for name, block in blocks.items():
        for mine, theirs in zip(step(block, x, tables), expected, strict=True):
            error = float((mine - theirs).norm() / theirs.norm())
            if error > bound:
                raise SystemExit(f"{name} is wrong by {error:.1e}")
    sent = {name: counted(partial(step, block, x, tables)) for name, block in blocks.items()}
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(repeats):
        for name, block in blocks.items():
            seconds[name].append(timed(partial(step, block, x, tables)))
    return {name: (seconds[name], sent[name]) for name in blocks}


def alone(hidden: int, tokens: tuple[int, int], dtype_name: str, repeats: int) -> float:
    """Return the median seconds of the whole block in one process of one thread."""
    x = torch.randn(*tokens, hidden).to(DTYPES[dtype_name])
    tables = rotary_tables(torch.arange(tokens[1])[None], HEAD_DIM, 1e4, torch.float32)
    whole = make(hidden, DTYPES[dtype_name])
    return statistics.median(timed(lambda: step(whole, x, tables)) for _ in range(repeats))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--tokens", nargs="+", default=["1x8", "1x64", "1x512", "4x256"])
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print("| hidden | tokens | dtype | way | median ms | x floor | bytes all-reduced, / formula |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with RankPool(2, timeout=None) as pool, RankPool(1, timeout=None) as single:
        for hidden in options.hidden:
            for text in options.tokens:
                tokens = tuple(map(int, text.split("x")))
                for dtype in options.dtype:
                    found = pool.run(measure, hidden, tokens, dtype, options.repeats)[0]
                    whole = single.run(alone, hidden, tokens, dtype, options.repeats)[0]
                    show(hidden, text, dtype, found, whole)


def show(
    hidden: int, tokens: str, dtype: str, found: dict[str, tuple[list[float], int]], whole: float
) -> None:
    """Print one size."""
    batch, length = map(int, tokens.split("x"))
    formula = 4 * batch * length * hidden * DTYPES[dtype].itemsize
    floor = statistics.median(found["by hand"][0])
    for name, (seconds, sent) in found.items():
        median = statistics.median(seconds)
        volume = f"{sent}, {sent / formula:.2f}" if sent else "not seen: functional collectives"
        print(
            f"| {hidden} | {tokens} | {dtype} | {name} | {1e3 * median:.2f} | "
            f"{median / floor:.3f} | {volume} |"
        )
    print(
        f"| {hidden} | {tokens} | {dtype} | one process, one thread | {1e3 * whole:.2f} | "
        f"{whole / floor:.3f} | |",
        flush=True,
    )


if __name__ == "__main__":
    main()

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
from scaletorch.parallel.tensor_parallel import Divide, Plan, apply_tensor_parallel

HEAD_DIM = 64
PLAN: Plan = {
    "self_attn": Divide("num_heads", "num_kv_heads"),
    **{f"self_attn.{name}_proj": "column" for name in "qkv"},
    "self_attn.o_proj": "row",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
}
STYLES = {name: style for name, style in PLAN.items() if isinstance(style, str)}
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


class Gather(torch.autograd.Function):
    """all_gather of the sequence forward, reduce_scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the whole sequence [B, L, H]."""
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return this rank's share of the sum."""
        return scattered(grads[0])


class Scatter(torch.autograd.Function):
    """reduce_scatter of the sequence forward, all_gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return this rank's share of the sum."""
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the whole gradient."""
        return gathered(grads[0])


def gathered(x: Tensor) -> Tensor:
    """Join shares [B, L / N, H] along the sequence."""
    parts = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(parts, x.contiguous())
    return torch.cat(parts.split(x.shape[0]), 1)


def scattered(x: Tensor) -> Tensor:
    """Sum [B, L, H] over the ranks and keep this rank's share."""
    parts = torch.cat(x.chunk(dist.get_world_size(), 1))
    own = torch.empty_like(parts[: x.shape[0]])
    dist.reduce_scatter_single(own, parts)
    return own


class Half(nn.Module):
    """A half of the block written by hand: its input enters, its output leaves."""

    def __init__(self, inner: nn.Module, enter: Any, leave: Any) -> None:
        super().__init__()
        self.inner, self.enter, self.leave = inner, enter, leave

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        """Run the half on shards."""
        inner: Any = self.inner
        out: Tensor = self.leave.apply(inner(self.enter.apply(x), *rest))
        return out


def divide(block: Block, world_size: int) -> None:
    """Give the attention of this rank its share of the heads."""
    block.self_attn.num_heads //= world_size
    block.self_attn.num_kv_heads //= world_size


def by_hand(block: Block, enter: Any = Enter, leave: Any = Leave) -> nn.Module:
    """Cut every weight by hand."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, style in STYLES.items():
        layer: Any = block.get_submodule(name)
        shard = layer.weight.detach().chunk(world_size, 0 if style == "column" else 1)[rank]
        layer.weight = nn.Parameter(shard.contiguous())
    divide(block, world_size)
    block.self_attn = Half(block.self_attn, enter, leave)  # type: ignore[assignment]
    block.mlp = Half(block.mlp, enter, leave)  # type: ignore[assignment]
    return block


def by_hand_on_shares(block: Block) -> nn.Module:
    """The same with sequence parallelism; `step` sums the norms' gradients."""
    return by_hand(block, Gather, Scatter)


def ours(block: Block, **options: Any) -> nn.Module:
    """Apply a plan."""
    return apply_tensor_parallel(block, PLAN, dist.group.WORLD, **options)


def ours_on_shares(block: Block) -> nn.Module:
    """Apply it with sequence parallelism."""
    return ours(block, sequence_parallel=True)


def dtensor(block: Block) -> nn.Module:
    """Apply torch's plan."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    plan = {name: styles[style]() for name, style in STYLES.items()}
    divide(block, dist.get_world_size())
    return parallelize_module(block, mesh, plan)


WAYS: dict[str, Callable[[Block], nn.Module]] = {
    "by hand": by_hand,
    "scaletorch": ours,
    "DTensor": dtensor,
    "by hand, sequence parallel": by_hand_on_shares,
    "scaletorch, sequence parallel": ours_on_shares,
}
FLOORS = {name: "by hand" + name.removeprefix(name.partition(",")[0]) for name in WAYS}


def make(hidden: int, dtype: torch.dtype) -> Block:
    """Return the whole block, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 3, num_heads=hidden // HEAD_DIM,
        num_kv_heads=hidden // HEAD_DIM,
    )  # fmt: skip
    return Block(config).to(dtype)


def step(
    block: nn.Module, x: Tensor, tables: tuple[Tensor, Tensor], summed: bool = False
) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return the output and the input's gradient.

    Args:
        block: the block.
        x: [B, L, H], or this rank's share of the sequence.
        tables: of the rotary embedding.
        summed: sum the norms' gradients over the ranks by hand.
    """
    x = x.detach().requires_grad_()
    out = block(x, *tables)
    out.sum().backward()
    if summed:
        norms = [p.grad for n, p in block.named_parameters() if "norm" in n and p.grad is not None]
        flat = torch.cat(norms)
        dist.all_reduce(flat)
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
    share = x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
    runs = {}
    for name, block in blocks.items():
        shares = "sequence" in name
        by_hand_sum = shares and name.startswith("by hand")
        runs[name] = partial(step, block, share if shares else x, tables, by_hand_sum)
        for mine, theirs in zip(runs[name](), expected, strict=True):
            part = theirs.chunk(dist.get_world_size(), 1)[dist.get_rank()] if shares else theirs
            error = float((mine - part).norm() / part.norm())
            if error > bound:
                raise SystemExit(f"{name} is wrong by {error:.1e}")
    sent = {name: counted(run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(timed(run))
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
    medians = {name: statistics.median(seconds) for name, (seconds, _) in found.items()}
    for name, (_, sent) in found.items():
        median, floor = medians[name], medians[FLOORS[name]]
        volume = f"{sent}, {sent / formula:.2f}" if sent else "other calls"
        print(
            f"| {hidden} | {tokens} | {dtype} | {name} | {1e3 * median:.2f} | "
            f"{median / floor:.3f} | {volume} |"
        )
    print(
        f"| {hidden} | {tokens} | {dtype} | one process, one thread | {1e3 * whole:.2f} | "
        f"{whole / medians['by hand']:.3f} | |",
        flush=True,
    )


if __name__ == "__main__":
    main()

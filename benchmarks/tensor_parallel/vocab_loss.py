"""The loss of logits sharded by vocabulary over two ranks: time and peak memory.

Ours, torch's `loss_parallel`, and the plain loss on gathered logits, on two ranks of one thread;
and the plain loss on full logits in one process, the reference for memory. Times are of forward
and backward on the slower rank, every way in turn. Memory is the peak of torch's CPU allocator
(profiler events; without gloo's buffers), including the logits themselves and their gradient.

    python -m benchmarks.tensor_parallel.vocab_loss --tokens 512 --vocabulary 32000 --repeats 15
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from scaletorch.dist import launch
from scaletorch.dist.functional import gather
from scaletorch.parallel.tensor_parallel import vocab_parallel_cross_entropy

from ..harness.gauges import peak
from ..harness.tables import MIB, parser, ratio, table
from ..harness.turns import of_slowest_rank, repeated, seconds

RANKS = 2
OURS, PLAIN = "vocab_parallel_cross_entropy", "plain, one process"
Step = Callable[[Tensor, Tensor], Tensor]  # this rank's logits and the targets -> the loss
COLUMNS = ["way", "ms", "ratio (quartiles)", "peak MiB", "of plain", "loss error"]


@dataclass(frozen=True)
class Figures:
    """Measurements of one way: seconds of each repeat, peak bytes, error of the loss."""

    seconds: list[float]
    peak: int
    error: float


def ours(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss with three numbers a token communicated."""
    group, vocabulary = torch_dist.group.WORLD, RANKS * logits.shape[-1]
    loss = vocab_parallel_cross_entropy(logits, targets, group=group, vocab_size=vocabulary)
    loss.backward()
    return loss


def gathered(logits: Tensor, targets: Tensor) -> Tensor:
    """Gather the logits on every rank, then compute as one process does."""
    loss = functional.cross_entropy(gather(logits, -1, torch_dist.group.WORLD), targets)
    loss.backward()
    return loss


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute in one process."""
    loss = functional.cross_entropy(logits, targets)
    loss.backward()
    return loss


def torch_parallel(mesh: DeviceMesh) -> Step:
    """Return torch's own loss on sharded logits."""

    def step(logits: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            whole = DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)
            loss = functional.cross_entropy(whole, targets)
            loss.backward()
        return cast(DTensor, loss).to_local()

    return step


def run(step: Step, logits: Tensor, targets: Tensor) -> Tensor:
    """Run a step on a new copy of the logits; return the loss."""
    return step(logits.clone().requires_grad_(), targets).detach()


def measure(dtype: torch.dtype, tokens: int, vocabulary: int, repeats: int) -> dict[str, Figures]:
    """Measure every way in turn on this rank."""
    torch.set_num_threads(1)
    rank = torch_dist.get_rank()
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    whole = (torch.randn(tokens, vocabulary) * 2).to(dtype)
    targets = torch.randint(vocabulary, (tokens,))
    part = whole.chunk(RANKS, -1)[rank].contiguous()
    exact = functional.cross_entropy(whole.double(), targets)
    ways: dict[str, tuple[Step, Tensor]] = {
        OURS: (ours, part),
        "loss_parallel": (torch_parallel(mesh), part),
        "plain, gathered logits": (gathered, part),
        PLAIN: (plain, whole),
    }
    runs = {name: partial(run, step, logits, targets) for name, (step, logits) in ways.items()}
    repeated(seconds, runs, 1)  # warm-up
    times = repeated(seconds, runs, repeats)
    return {
        name: Figures(of_slowest_rank(times[name]), peak(each), abs(each().item() - exact.item()))
        for name, each in runs.items()
    }


def report(title: str, ranks: list[dict[str, Figures]]) -> None:
    """Print a table, of the rank that needs the most memory."""
    base, whole = ranks[0][OURS].seconds, ranks[0][PLAIN].peak
    rows = []
    for name, figures in ranks[0].items():
        most = max(rank[name].peak for rank in ranks)
        median = f"{1e3 * statistics.median(figures.seconds):.1f}"
        sizes = [f"{most / MIB:.1f}", f"{most / whole:.3f}"]
        rows.append([name, median, ratio(figures.seconds, base, 2), *sizes, f"{figures.error:.1e}"])
    print(f"\n{title}\n\n{table(COLUMNS, rows)}")


def main() -> None:
    """Compare in float32 and in bf16."""
    command = parser(__doc__)
    command.add_argument("--tokens", type=int, default=512, metavar="N")
    command.add_argument("--vocabulary", type=int, default=32000, metavar="N")
    command.add_argument("--repeats", type=int, default=15, metavar="N")
    args = command.parse_args()
    if args.vocabulary % RANKS:
        command.error(f"--vocabulary must divide over {RANKS} ranks, got {args.vocabulary}")
    for dtype in (torch.float32, torch.bfloat16):
        size = (args.tokens, args.vocabulary)
        ranks = launch(measure, RANKS, dtype, *size, args.repeats, timeout=600)
        report(f"{dtype}, {size[0]} tokens, vocabulary {size[1]}, {RANKS} ranks", ranks)


if __name__ == "__main__":
    main()

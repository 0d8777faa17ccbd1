"""Cost of recording a step and of comparing two recordings: time, memory, disk.

One process trains a Llama; plain and recorded steps take turns. They are compared with what people
write by hand to look at activations: a forward hook on every module that copies its output, without
gradients, weights and places. Then two recordings are compared in a separate process. Files go
to the temporary folder: set TMPDIR.

    python -m benchmarks.bisecting --quick
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaletorch.bisect import compare, record
from scaletorch.dist import launch
from scaletorch.models import Llama, LlamaConfig

from .harness.memory import forget_peak, resident
from .harness.tables import MIB, machine, parser, publish, ratio, row, spread, table
from .harness.turns import in_turns

GIB = 2**30
SIZES = {
    "2 M": (LlamaConfig(2048, 256, 704, 2, 4, 4), 16, 128),
    "21 M": (LlamaConfig(8192, 512, 1408, 4, 8, 8), 8, 256),
    "99 M": (LlamaConfig(32000, 768, 2048, 7, 12, 12), 4, 512),
    "99 M, 512 tokens": (LlamaConfig(32000, 768, 2048, 7, 12, 12), 1, 512),
}
PLAIN, HOOKS, RECORDED = "plain", "hooks by hand", "recorded"


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """Train one step; return its loss."""
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def measure(size: str, repeats: int, folder: str) -> dict[str, list[tuple[float, int]]]:
    """Return (seconds, peak bytes) of the steps of each way."""
    config, rows, length = SIZES[size]
    torch.manual_seed(0)
    model = Llama(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(config.vocab_size, (rows, length + 1))
    step(model, optimizer, ids)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def hooked() -> None:
        kept: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            kept.append(output.detach().clone())

        hooks = [m.register_forward_hook(keep) for m in model.modules()]
        step(model, optimizer, ids)
        torch.save(kept, Path(folder, "hooks.pt"))
        for hook in hooks:
            hook.remove()

    def recorded() -> None:
        with record(Path(folder, "one"), model) as tape:
            tape.put("loss", step(model, optimizer, ids))

    ways: dict[str, Callable[[], object]] = {
        PLAIN: lambda: step(model, optimizer, ids), HOOKS: hooked, RECORDED: recorded,
    }  # fmt: skip
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for name in in_turns(ways, repeats + 1):  # the first turn is a warm-up
        model.load_state_dict(start)
        forget_peak()
        begin = time.perf_counter()
        ways[name]()
        found[name].append((time.perf_counter() - begin, resident("HWM")))
    shutil.copytree(Path(folder, "one"), Path(folder, "two"))
    return {name: figures[1:] for name, figures in found.items()}


def judge(folder: str) -> tuple[float, int]:
    """Return the seconds and peak bytes of a comparison."""
    begin = time.perf_counter()
    if not compare(Path(folder, "one"), Path(folder, "two")).sound:
        raise SystemExit("two copies of a recording differ")
    return time.perf_counter() - begin, resident("HWM")


def lines(sizes: list[str], repeats: int) -> Iterator[str]:
    """Yield the table."""
    yield f"{machine()}, medians of {repeats} (quartiles)\n"
    yield table(
        ["parameters", "step", HOOKS, RECORDED, "peak, plain", "recorded", "disk", "compared in",
         "peak"], [],
    )  # fmt: skip
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="scaletorch-bisecting-") as folder:
            (figures,) = launch(measure, 1, size, repeats, folder, timeout=3600)
            disk = sum(file.stat().st_size for file in Path(folder, "one").iterdir())
            ((seconds, peak),) = launch(judge, 1, folder, timeout=3600)
        times = {name: [each[0] for each in found] for name, found in figures.items()}
        peaks = {name: max(each[1] for each in found) / GIB for name, found in figures.items()}
        yield row(
            size,
            f"{spread(times[PLAIN])} s",
            ratio(times[HOOKS], times[PLAIN], 2),
            ratio(times[RECORDED], times[PLAIN], 2),
            f"{peaks[PLAIN]:.2f} GiB",
            f"{peaks[RECORDED]:.2f}",
            f"{disk / MIB:.0f} MiB",
            f"{seconds:.1f} s",
            f"{peak / GIB:.2f} GiB",
        )


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--quick", action="store_true", help="the smallest model, three repeats")
    command.add_argument("--repeats", type=int, default=5)
    command.add_argument("--out", type=Path, help="a file for the table")
    arguments = command.parse_args()
    sizes, repeats = ([*SIZES][:1], 3) if arguments.quick else ([*SIZES], arguments.repeats)
    publish(lines(sizes, repeats), arguments.out)


if __name__ == "__main__":
    main()

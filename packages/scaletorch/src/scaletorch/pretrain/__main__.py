"""``python -m scaletorch.pretrain --tp 2 --cp 2 --pp 2 --dp 2``."""

from __future__ import annotations

import sys
import time

from ..dist.errors import ScaletorchError
from .config import PretrainConfig
from .run import LOSS_BOUND, Result, pretrain


def parse() -> PretrainConfig:
    """Read the command line."""
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
        import tyro
    except ImportError as error:
        raise SystemExit(
            f"the command needs {error.name}: pip install 'scaletorch[pretrain]'"
        ) from error
    return tyro.cli(PretrainConfig, prog=f"python -m {__package__}", description=__doc__)


def summary(config: PretrainConfig, result: Result, seconds: float) -> str:
    """Return the closing lines."""
    first, last = (f"{x:.4f}" for x in (result.losses[0], result.losses[-1]))
    lines = [
        f"{config.grid}: loss {first} -> {last} in {len(result.losses)} steps, {seconds:.0f} s",
        f"log and curve: {result.out}/log.jsonl, {result.out}/loss.png",
    ]
    if result.reference is not None:
        worst, bound = result.worst_difference(), LOSS_BOUND[config.dtype]
        verdict = "as one process" if as_one_process(config, result) else "NOT AS ONE PROCESS"
        lines.append(
            f"{verdict}: largest relative difference of {len(result.losses)} losses {worst:.1e}, "
            f"bound {bound:.0e} ({config.dtype})"
        )
    return "\n".join(lines)


def as_one_process(config: PretrainConfig, result: Result) -> bool:
    """Tell whether every loss is one process's but for rounding, where that was asked."""
    return result.reference is None or result.worst_difference() <= LOSS_BOUND[config.dtype]


def main() -> int:
    """Run the command; 1 where the loss curve leaves one process's, 2 for wrong settings."""
    config = parse()
    start = time.perf_counter()
    try:
        result = pretrain(config)
    except ScaletorchError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if result is None:
        return 0
    if result.losses:
        print(summary(config, result, time.perf_counter() - start))
    else:
        print(f"nothing to do: {result.out} already holds step {config.steps}")
    return int(not as_one_process(config, result))


if __name__ == "__main__":
    sys.exit(main())

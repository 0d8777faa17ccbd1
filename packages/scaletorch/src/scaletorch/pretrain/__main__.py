"""`python -m scaletorch.pretrain --tp 2 --cp 2 --pp 2 --dp 2`."""

from __future__ import annotations

import sys
import time

from ..checkpoint import latest
from ..dist import RankFailedError
from ..dist.building import without_coordinates
from ..dist.errors import ScaletorchError
from .config import PretrainConfig
from .run import LARGEST, Result, pretrain

PROGRAM = "python -m scaletorch.pretrain"
DESCRIPTION = """Train a small Llama, or Mixtral with --experts, on text, on any layout of ranks.

It starts its own ranks on this machine, or is one rank of torchrun, srun or mpirun. The text is the
Python standard library's sources unless --data names other. All defaults below are those of this
command; `hatch run train` in a clone of the repository adds --tp 2 --cp 2 --pp 2 --dp 2 --compare,
and what you pass comes after these.
"""


def parse(arguments: list[str]) -> PretrainConfig:
    """Parse the command line of a training run."""
    try:
        import tyro
    except ImportError:
        raise SystemExit("the command needs tyro: pip install 'scaletorch[pretrain]'") from None
    return tyro.cli(PretrainConfig, prog=PROGRAM, description=DESCRIPTION, args=arguments)


def summary(config: PretrainConfig, result: Result, seconds: float) -> str:
    """Return the closing lines of a run."""
    first, last = (f"{x:.4f}" for x in (result.losses[0], result.losses[-1]))
    lines = [
        f"{config.grid}: loss {first} -> {last} in {len(result.losses)} steps, {seconds:.0f} s",
        f"log: {result.out}/log.jsonl",
    ]
    if result.reference is not None:
        verdict = "as one process" if as_one_process(config, result) else "NOT AS ONE PROCESS"
        lines.append(
            f"{verdict}: largest relative difference of {len(result.losses)} losses "
            f"{result.worst_difference():.1e}, allowed {LARGEST[config.dtype]:.0e} ({config.dtype})"
        )
    return "\n".join(lines)


def as_one_process(config: PretrainConfig, result: Result) -> bool:
    """Return whether every loss equals one process's up to rounding, or was not compared."""
    return result.reference is None or result.worst_difference() <= LARGEST[config.dtype]


def report_interrupt(config: PretrainConfig) -> None:
    """Print how to continue a run that Ctrl-C ended."""
    saved = None if config.out is None else latest(config.out / "checkpoints")
    on = "no checkpoint to go on from" if saved is None else f"go on from {saved} by --resume auto"
    print(f"interrupted: {on}", file=sys.stderr)


def one_line(error: ScaletorchError) -> str:
    """Return an error's text; if all ranks failed with the same error of ours, that one's text."""
    if isinstance(error, RankFailedError):
        found = error.exceptions.values()
        causes = {without_coordinates(f"{type(each).__name__}: {each}"): each for each in found}
        alike = len(causes) == 1 and len(error.exceptions) == len(error.failures)
        if alike and isinstance(next(iter(causes.values())), ScaletorchError):
            first = next(iter(causes.values()))
            return f"{type(first).__name__}: {first}"
    return f"{type(error).__name__}: {error}"


def main(arguments: list[str] | None = None) -> int:
    """Train.

    Returns:
        1 if the loss curve differs from one process's, 2 for invalid settings, 130 after Ctrl-C.
    """
    config, start = parse(sys.argv[1:] if arguments is None else arguments), time.perf_counter()
    try:
        result = pretrain(config)
    except ScaletorchError as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        report_interrupt(config)
        return 130
    if result is None:
        return 0
    if not result.losses:
        print(
            f"nothing to do: {result.out} already holds step {config.steps}; train on with --steps"
        )
        return 0
    print(summary(config, result, time.perf_counter() - start))
    if result.reference:
        first, last = (f"{x:.4f}" for x in (result.reference[0], result.reference[-1]))
        print(f"in one process: loss {first} -> {last}")
    return int(not as_one_process(config, result))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m scaletorch.verify --world-size 8`: does every layout train like one process?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..compose.naming import load, parse_layout, read_argument
from ..dist.errors import InvalidArgumentError, ScaletorchError
from ..parallel.pg_manager import Grid
from .cases import DTYPES, KNOWN_DTYPES, OPTIONS, every_layout
from .device import named
from .problem import BatchFn, ModelFn, default_batch, default_mixture, default_model
from .report import CaseResult, Report
from .verify import verify

ROW_DIMS = "dims of rows of entries whose shapes do not tell, as pixels=1 table=None"
SEQUENCE_DIMS = "dims of positions of entries, which cp divides, as latents=1"
LOSS = "package.module:function of an output and a micro-batch, as train_step's loss_fn"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(f"python -m {__package__}", description=__doc__)
    add = parser.add_argument
    add("--world-size", type=int, help="try every layout of so many ranks")
    layouts = "DPxPPxCPxTP, as 2x1x2x2, 2x1x2x2-ep4 or -ep2-etp2, or dp2-tp2"
    add("--layout", nargs="+", default=[], help=layouts)
    add("--ep", type=int, nargs="*", help="experts over so many ranks; every size if none is named")
    add_training(parser)
    add("--dtype", nargs="+", default=list(DTYPES), choices=KNOWN_DTYPES)
    add("--every-option", action="store_true", help="cross all options' values")
    for name, values in OPTIONS.items():
        shown = f"values to try, of {', '.join(map(str, values))}; {values[0]} by default"
        add(f"--{name.replace('_', '-')}", nargs="+", type=type(values[0]), help=shown)
    return parser.parse_args(arguments)


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the model, its training and the device; see `training_of`."""
    add = parser.add_argument
    add("--model", help="package.module:function that makes the plain module")
    add("--batch", help="package.module:function of a step, the global batch")
    add("--plan", help="package.module:name of a tensor parallel plan")
    add("--loss", help=LOSS)
    add("--row-dims", nargs="+", default=[], help=ROW_DIMS)
    add("--sequence-dims", nargs="+", default=[], help=SEQUENCE_DIMS)
    add("--optimizer", help="package.module:Class, or one of torch.optim: all steps are of that")
    add("--optimizer-args", nargs="+", default=[], help="such as lr=0.02 nesterov=False")
    add("--timeout", type=float, default=120.0, help="seconds for one layout's run")
    add("--device", help="cpu or, by default, this machine's accelerator")
    add("--backend", help="of the ranks; the device's own by default")


def options_of(arguments: argparse.Namespace) -> dict[str, Sequence[str | int]]:
    """Return the values to try of each option."""
    defaults = {n: v if arguments.every_option else v[:1] for n, v in OPTIONS.items()}
    return {name: getattr(arguments, name) or values for name, values in defaults.items()}


def problem_of(arguments: argparse.Namespace, layouts: list[Grid]) -> tuple[ModelFn, BatchFn]:
    """Return the model and batch functions named, or the built-in ones."""
    plain = getattr(arguments, "ep", None) is None and all(grid.is_plain for grid in layouts)
    built_in = default_model if plain else default_mixture
    return (
        load(arguments.model) if arguments.model else built_in,
        load(arguments.batch) if arguments.batch else default_batch,
    )


def training_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments about training that `verify` and `bisect` share."""
    optimizer = arguments.optimizer
    if optimizer is not None:
        optimizer = load(optimizer if ":" in optimizer else f"torch.optim:{optimizer}")
    return {
        "plan": load(arguments.plan) if arguments.plan else None,
        "row_dims": dict(map(read_argument, arguments.row_dims)),
        "sequence_dims": dict(map(read_argument, arguments.sequence_dims)),
        "loss_fn": load(arguments.loss) if arguments.loss else None,
        "optimizer": optimizer,
        "optimizer_args": dict(map(read_argument, arguments.optimizer_args)),
        "timeout": arguments.timeout,
        "device": arguments.device,
        "backend": arguments.backend,
    }


def run(arguments: argparse.Namespace) -> Report:
    """Run `verify` with the command line's arguments; show progress if stderr is a terminal."""
    layouts = [parse_layout(text) for text in arguments.layout]
    if not layouts and arguments.world_size is None:
        raise InvalidArgumentError("pass --world-size N, or --layout DPxPPxCPxTP")
    model, batch = problem_of(arguments, layouts or every_layout(arguments.world_size))

    def progress(result: CaseResult) -> None:
        if sys.stderr.isatty():
            print(*result.row()[:2], file=sys.stderr)

    return verify(
        model,
        batch,
        layouts=layouts or None,
        world_size=arguments.world_size,
        ep=arguments.ep or None,
        dtype=arguments.dtype,
        options=options_of(arguments),
        progress=progress,
        **training_of(arguments),
    )


def main(given: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0: all is well. 1: a layout trains differently from one process. 2: wrong usage, a refused
    layout that was named, or nothing but refused layouts.
    """
    arguments = parse(given)
    try:
        report = run(arguments)
    except ScaletorchError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    model = arguments.model
    if model is None and arguments.ep is not None:  # the built-in model with experts
        model = problem_of(arguments, [result.case.grid for result in report.results])[0]
    settings = {**vars(arguments), "model": model, "loss_fn": arguments.loss}
    report = replace(report, command=report.command + named(settings))
    print(report)
    return 0 if report.passed else 1 if report.failures else 2


if __name__ == "__main__":
    sys.exit(main())

"""Compare an unchanged training script on several ranks with the same script in one process.

The script runs in its own process, with hooks around its first step. Recording starts at the first
call of the model that its optimizer trains, and ends after the optimizer's step. Then the process
ends.
"""

from __future__ import annotations

import gc
import os
import re
import runpy
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as steps

from ..dist.errors import InvalidArgumentError
from ..verify.compare import LARGEST
from .compare import compare
from .comparing.judge import coarsest, measure
from .comparing.runs import load
from .keys import FINAL, FORWARD, START
from .recording.hooks import calls_to
from .recording.stages import Stages
from .recording.tape import record
from .report import Report

SHOWN = 25  # lines of a script's output in an error
PATIENCE = 60.0  # seconds that a rank waits for the recordings of others
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DRAWS = "draws"  # name of an empty file that says that the step drew random numbers


def doctor(script: Path, arguments: Sequence[str], nproc: int, folder: Path) -> Report:
    """Compare the first step of a script on ranks with that of the script in one process.

    Args:
        script: A training script that both `python` and `torchrun` can start.
        arguments: Its command line arguments.
        nproc: Number of ranks.
        folder: Folder for recordings and outputs.

    Raises:
        InvalidArgumentError: The script fails, makes no step, or two runs of it in one process
            differ.
    """
    words = [str(script), *arguments]
    alone, again, ranks = (folder / name for name in ("alone", "again", "ranks"))
    failure = _run(alone, words, 0)
    launched = 1 if failure else 0  # some scripts run under torchrun only
    _require_run("alone", failure and _run(alone, words, 1) and failure)
    _require_run(f"on {nproc} ranks", _run(ranks, words, nproc))
    _require_run("alone again", _run(again, words, launched, perturbed=True))
    _require_the_same(alone, again)
    report = compare(alone, ranks, noise=again)
    if (ranks / _DRAWS).exists() and report.found:
        report.notes.append(
            "the step draws random numbers, as dropout does, and ranks draw others than one "
            "process: turn that off to see other differences"
        )
    return report


def _run(folder: Path, words: Sequence[str], ranks: int, *, perturbed: bool = False) -> str:
    """Run a script with hooks, by torchrun if `ranks` is not 0; return its output if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("step0.rank*"), *folder.glob(_DRAWS)):
        old.unlink()
    start = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    child = [f"{__package__}.doctor", str(folder), str(int(perturbed)), *words]
    command = [sys.executable, "-m", *(start if ranks else []), *child]
    kept = {name: value for name, value in os.environ.items() if name not in _RANKS}
    said = folder / "output"
    with said.open("w") as out:
        status = subprocess.run(command, env=kept, stdout=out, stderr=out, check=False).returncode
    return said.read_text(errors="replace") or f"exit status {status}" if status else ""


def _require_run(how: str, failure: str) -> None:
    if failure:
        own = re.split(r"^E\d{4} .*torch/distributed/elastic", failure, maxsplit=1, flags=re.M)[0]
        shown = "\n".join(own.rstrip().splitlines()[-SHOWN:])
        raise InvalidArgumentError(f"the script failed when it ran {how}:\n{shown}")


def _require_the_same(alone: Path, again: Path) -> None:
    """Refuse a script if two runs of it alone differ by more than perturbed weights explain."""
    reference, other = load(alone), load(again)
    eps, lost = coarsest(other), measure(other, reference)
    for key, error in lost.items():
        given = key[1:3] == (FORWARD, "") and key.item.startswith("in")
        limit = {START: 4.0, FORWARD: 0.0}.get(key.kind, max(LARGEST / eps, 64.0))
        if (given or key.kind in FINAL) and error > limit:
            raise InvalidArgumentError(
                f"two runs of the script alone differ: {key} by {error * eps:.1e}. Seed it "
                "(torch.manual_seed, the order of the data) and turn off what draws at random; if "
                "that is done, rounding alone does this, and would hide faults: use float64"
            )


class _FirstStep:
    """Records a script's first step, then ends the process.

    Args:
        folder: Folder for the recordings.
        optimizers: The script's optimizers; the collection grows as it makes them.
        perturbed: Whether to change the weights by up to an epsilon before the step.
    """

    def __init__(self, folder: Path, optimizers: Iterable[Optimizer], *, perturbed: bool) -> None:
        self._folder, self._optimizers, self._perturbed = folder, optimizers, perturbed
        self._stack, self._calls, self._steps = ExitStack(), 0, 0
        self._known: set[int] = set()  # parameters of the model, once the step has begun
        self._random = torch.get_rng_state()

    def called(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kw: Any) -> Any:
        """Start recording at the first call of the model that is trained."""
        waits = not self._known and not self._calls and torch.is_grad_enabled()
        if waits and (model := _trained_model(module, self._trained())) is not None:
            self._begin(model)
            return module(*args, **kw)
        self._calls += 1
        try:
            return original(module, *args, **kw)
        finally:
            self._calls -= 1

    def _trained(self) -> list[list[Tensor]]:
        """Return the parameters that each optimizer trains."""
        groups = [optimizer.param_groups for optimizer in self._optimizers]
        return [[p for each in own for p in each["params"] if p.requires_grad] for own in groups]

    def _begin(self, model: nn.Module) -> None:
        self._known = {id(parameter) for parameter in model.parameters()}
        if self._perturbed:
            _perturb(model)
        self._random = torch.get_rng_state()
        self._stack.enter_context(record(self._folder, model))
        before = steps.register_optimizer_step_pre_hook(self._before)
        behind = steps.register_optimizer_step_post_hook(self._behind)
        self._stack.callback(before.remove)
        self._stack.callback(behind.remove)

    def _before(self, *_: Any) -> None:
        self._steps += 1

    def _behind(self, *_: Any) -> None:
        self._steps -= 1
        if self._steps:
            return  # an optimizer called by another
        self._stack.close()
        others = (p for p in chain(*self._trained()) if id(p) not in self._known)
        if any(parameter.grad is not None for parameter in others):
            raise SystemExit(
                "optimizers train more than the model that is called, and no module holds all of "
                "it: put what is trained into one nn.Module"
            )
        if not torch.equal(self._random, torch.get_rng_state()):
            (self._folder / _DRAWS).touch()
        ranks, until = int(os.environ.get("WORLD_SIZE", "1")), time.monotonic() + PATIENCE
        while len(list(self._folder.glob("step0.rank*.json"))) < ranks and time.monotonic() < until:
            time.sleep(0.02)  # a rank that exits early breaks communication of the others
        leave()


def leave() -> None:
    """End the process at once, without the rest of the script."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _trained_model(called: nn.Module, by_optimizer: Sequence[Sequence[Tensor]]) -> nn.Module | None:
    """Return the model or stages that optimizers train through this call; None if there is none."""
    if "torch.distributed.pipelining" in sys.modules:
        stages = [each for each in gc.get_objects() if hasattr(type(each), "forward_one_chunk")]
        if any(called in stage.submod.modules() for stage in stages):
            return Stages(stages)
    own = {id(p) for p in called.parameters() if p.requires_grad}
    trained = {id(p) for each in by_optimizer if own & set(map(id, each)) for p in each}
    if trained <= own:
        return called if trained else None
    modules = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    holders = [m for m in modules if trained <= {id(p) for p in m.parameters()}]
    return min(holders, key=lambda module: len(list(module.modules())), default=called)


@contextmanager
def _noting_optimizers() -> Iterator[Iterable[Optimizer]]:
    """Yield a set to which every optimizer made within the context is added, by weak reference."""
    made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    kind: Any = Optimizer
    original = kind.__init__

    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.add(self)

    kind.__init__ = init
    try:
        yield made
    finally:
        kind.__init__ = original


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    """Change weights by up to an epsilon of their dtype, like rounding."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if own.is_floating_point():
            part = torch.rand(own.shape, generator=generator, dtype=torch.float64) * 2 - 1
            own.copy_(own.double() * (1 + torch.finfo(own.dtype).eps * part.to(own.device)))


def follow(folder: Path, script: str, arguments: Sequence[str], *, perturbed: bool) -> None:
    """Run a script as `python script` would, and record its first step.

    Raises:
        SystemExit: The script ended before an optimizer made a step.
    """
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    with (
        _noting_optimizers() as optimizers,
        calls_to(_FirstStep(folder, optimizers, perturbed=perturbed).called),
    ):
        runpy.run_path(script, run_name="__main__")
    raise SystemExit(f"{script} ended, and no optimizer made a step for a model that was called")


if __name__ == "__main__":
    follow(Path(sys.argv[1]), sys.argv[3], sys.argv[4:], perturbed=sys.argv[2] == "1")

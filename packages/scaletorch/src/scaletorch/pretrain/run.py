"""Where ranks come from: a launcher's, or our own; and the comparison with one process."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..dist import RankPool, cleanup_dist, init_dist, is_distributed, is_main_process, launch
from ..dist.differences import relative_error, worst
from ..dist.errors import StateError
from .config import PretrainConfig
from .report import save_curve
from .train import train

# Largest relative difference of any step's loss between a layout and one process.
LOSS_BOUND = {"float32": 1e-3, "float64": 1e-8, "bfloat16": 2e-2}


@dataclass(frozen=True, slots=True)
class Result:
    """What a run gives.

    Attributes:
        losses: the global loss of each step done.
        out: folder with log, curve and checkpoints.
        reference: one process's losses of the same steps, when they were asked for.
    """

    losses: list[float]
    out: Path
    reference: list[float] | None = None

    def worst_difference(self) -> float:
        """Return the largest relative difference of any step's loss from one process's.

        It is infinite where either loss is not finite, and 0 where no step was left to do.

        Raises:
            StateError: there is nothing to compare with: the run was made without ``compare``.
        """
        if self.reference is None:
            raise StateError("expected losses of one process, got none: train with compare=True")
        if not self.losses and not self.reference:
            return 0.0
        pairs = zip(_numbers(self.losses), _numbers(self.reference), strict=True)
        return worst(relative_error(ours, one) for ours, one in pairs)


def _numbers(losses: list[float]) -> torch.Tensor:
    return torch.tensor(losses, dtype=torch.float64)


def pretrain(config: PretrainConfig) -> Result | None:
    """Train on the grid of ``config``, with a launcher's ranks or with local ranks of our own.

    Returns:
        The result on rank 0, and None on a launcher's other ranks.

    Raises:
        InvalidArgumentError: settings that cannot work, before any rank starts.
        StateError: a Slurm job of several tasks runs this without srun.
    """
    config.check()
    out = config.out
    init_dist(backend=config.backend)  # does nothing where no launcher started this process
    if is_distributed():
        main = is_main_process()
        out = out or (Path(tempfile.mkdtemp(prefix="scaletorch-")) if main else None)
        losses = train(replace(config, out=out))
        cleanup_dist()
        if not main or out is None:
            return None
    else:
        out = out or Path(tempfile.mkdtemp(prefix="scaletorch-"))
        losses = train_locally(replace(config, out=out))
    reference = one_process_losses(config, len(losses)) if config.compare else None
    curves = {str(config.grid): losses} | ({"one process": reference} if reference else {})
    save_curve(out / "loss.png", curves)
    return Result(losses, out, reference)


def train_locally(config: PretrainConfig) -> list[float]:
    """Train in this process, or on as many local ranks as the grid has."""
    world_size = config.grid.world_size
    return train(config) if world_size == 1 else launch(train, world_size, config)[0]


def one_process_losses(config: PretrainConfig, steps: int) -> list[float]:
    """Return the last ``steps`` losses of the same training in one process of its own."""
    if not steps:
        return []
    with tempfile.TemporaryDirectory(prefix="scaletorch-") as folder:
        alone = replace(config.one_process(), out=Path(folder))
        with RankPool(1, timeout=None) as pool:  # its own process, as a launcher's rank is not one
            losses: list[float] = pool.run(train, alone)[0]
    return losses[len(losses) - steps :]

"""The start of ranks, by a launcher or on this machine, and the comparison with one process."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..dist import (
    RankPool,
    broadcast_object_list,
    cleanup_dist,
    devices,
    init_dist,
    is_distributed,
    is_main_process,
    launch,
)
from ..dist.building import agree, caught, relative_error, worst
from ..dist.errors import InvalidArgumentError, StateError
from .config import PretrainConfig, check_config
from .train import train

# Largest relative difference between a loss of a layout and one process's. Over 60 steps on two
# ranks, losses differ by 1 epsilon at the default learning rate, and by 23,000 at ten times that.
LARGEST = {"float32": 1e-3, "float64": 1e-8, "bfloat16": 2e-2}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run.

    Attributes:
        losses: Global loss of each step of this run.
        out: Folder with log and checkpoints.
        reference: One process's losses of the same steps, if they were compared.
    """

    losses: list[float]
    out: Path
    reference: list[float] | None = None

    def worst_difference(self) -> float:
        """Return the largest relative difference from one process's loss; inf if not finite."""
        if self.reference is None:
            raise StateError("expected losses of one process, got none: train with compare=True")
        losses, reference = (
            torch.tensor(each, dtype=torch.float64) for each in (self.losses, self.reference)
        )
        return worst(map(relative_error, losses, reference))


def pretrain(config: PretrainConfig) -> Result | None:
    """Train on the grid of `config`, on a launcher's ranks or on local ranks that this starts.

    Args:
        config: Settings of the run.

    Returns:
        The result on rank 0, None on a launcher's other ranks.

    Raises:
        InvalidArgumentError: A setting is wrong by itself, its path or backend does not work, or
            the grid cannot be; raised before any rank starts. What the model or its batches cannot
            have, such as more stages than layers, is refused on the ranks, by `parallelize` or in
            the first step.
        RankFailedError: A local rank failed, also if it refused its layout.
        StateError: A Slurm job with several tasks runs this without srun.
    """
    # Does nothing if no launcher started this process.
    init_dist(backend=config.backend or devices.default_backend())
    agree("the settings of the run", [], error=caught(prepare, config))
    folder = [""]
    if is_main_process():
        folder = [str(config.out or tempfile.mkdtemp(prefix="scaletorch-"))]
    broadcast_object_list(folder)
    config = replace(config, out=Path(folder[0]))
    if is_distributed():
        losses = train(config)
        main = is_main_process()
        cleanup_dist()
        if not main:
            return None
    else:
        losses = train_locally(config)
    reference = one_process_losses(config, len(losses)) if config.compare and losses else None
    return Result(losses, Path(folder[0]), reference)


def prepare(config: PretrainConfig) -> None:
    """Check the settings and make the output folder."""
    check_config(config)
    if config.out is not None:
        try:
            config.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgumentError(
                f"out {config.out} cannot be made: {error.strerror}"
            ) from error


def train_locally(config: PretrainConfig) -> list[float]:
    """Train in this process, or on as many local ranks as the grid has."""
    size = config.grid.world_size
    if size == 1:
        return train(config)
    losses: list[float] = launch(train, size, config, backend=config.backend)[0]
    return losses


def one_process_losses(config: PretrainConfig, steps: int) -> list[float]:
    """Return the last `steps` losses of the same training in a separate single process."""
    with tempfile.TemporaryDirectory(prefix="scaletorch-") as folder:
        alone = replace(config.one_process(), out=Path(folder))
        with RankPool(1, timeout=None) as pool:  # a new process: a launcher's rank has a group
            losses: list[float] = pool.run(train, alone)[0]
    return losses[len(losses) - steps :]

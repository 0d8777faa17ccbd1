"""The start of ranks, by a launcher or on this machine, and the comparison with one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..compose.summation import chain_length
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
from ..verify.differences import bound
from .config import PretrainConfig, check_config, plain_model, sizes_of
from .data import vocabulary_size
from .train import train

# Largest relative difference between a layout's loss curve and one process's. A step's loss may
# have the rounding error that `verify` allows, times `GROWTH` for each step before it, since
# training amplifies it: over 60 steps on two ranks, losses differ by 1 epsilon at the default
# learning rate, and by 23,000 at ten times that. `LARGEST` is the limit, reached after 8 steps of
# float32 and 43 of float64. bfloat16 has only `LARGEST`: its epsilon allows everything.
LARGEST = {"float32": 1e-3, "float64": 1e-8, "bfloat16": 2e-2}
GROWTH = 1.25  # factor by which a step may amplify a difference
FAR = 1000  # cap of the exponent, which would overflow a float; `LARGEST` holds long before


def loss_bounds(config: PretrainConfig, steps: Iterable[int]) -> list[float]:
    """Return the largest allowed relative difference of the loss of each 0-based step."""
    largest = LARGEST[config.dtype]
    if config.dtype == "bfloat16":
        return [largest for _ in steps]
    dtype: torch.dtype = getattr(torch, config.dtype)
    additions = _additions(config)
    return [
        min(largest, bound(dtype, additions, step) * GROWTH ** min(step, FAR)) for step in steps
    ]


def _additions(config: PretrainConfig) -> int:
    sizes = replace(sizes_of(config), vocab_size=vocabulary_size(config.tokenizer))
    with torch.device("meta"):
        return chain_length(plain_model(sizes), torch.empty(config.batch_size, config.seq_len))


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

    def differences(self) -> list[float]:
        """Return the relative difference of each loss from one process's, inf if not finite."""
        if self.reference is None:
            raise StateError("expected losses of one process, got none: train with compare=True")
        pairs = zip(_numbers(self.losses), _numbers(self.reference), strict=True)
        return [relative_error(ours, one) for ours, one in pairs]

    def worst_difference(self) -> float:
        """Return the largest of `differences`, or 0 if there are no steps."""
        found = self.differences()
        return worst(found) if found else 0.0

    def furthest(self, config: PretrainConfig) -> tuple[int, float, float]:
        """Return the 1-based step with the largest ratio of difference to bound, and these two."""
        found = self.differences()
        last = max(config.steps, len(found))
        bounds = loss_bounds(config, range(last - len(found), last))
        steps = zip(range(last - len(found) + 1, last + 1), found, bounds, strict=True)
        return max(steps, key=lambda step: step[1] / step[2])


def _numbers(losses: list[float]) -> torch.Tensor:
    return torch.tensor(losses, dtype=torch.float64)


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
    if not steps:
        return []
    with tempfile.TemporaryDirectory(prefix="scaletorch-") as folder:
        alone = replace(config.one_process(), out=Path(folder))
        with RankPool(1, timeout=None) as pool:  # a new process: a launcher's rank has a group
            losses: list[float] = pool.run(train, alone)[0]
    return losses[len(losses) - steps :]

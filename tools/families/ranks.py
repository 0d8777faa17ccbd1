"""One cell on one rank: train on the layout, and compare everything with one process."""

from __future__ import annotations

import warnings
from functools import partial

import transformers
from exactly import Exact
from torch import Tensor

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import MismatchError, ScaletorchError
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)

from ..gaps import Figures, gaps
from .axes import Axis
from .reference import STEPS, adam, batch, build

# A rank's result: how it ended ("trained", "refused", "heard" of another's refusal), the largest
# error, and its place or the error's words.
Said = tuple[str, float, str]


def run_cell(name: str, axis: Axis, expected: Figures) -> Said:
    """Train two steps on this rank; only refusals are caught, other errors are raised."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        manager = setup_process_group_manager(**axis.sizes)
        return _train(name, axis, expected, manager)
    except MismatchError as error:
        return "heard", 0.0, str(error)
    except ScaletorchError as error:
        return "refused", 0.0, str(error)
    finally:
        destroy_process_group_manager()


def _train(name: str, axis: Axis, expected: Figures, manager: ProcessGroupManager) -> Said:
    plain = build(name)
    with Exact():  # a forward suggests the plan of a family without one
        model = parallelize(plain, manager, **axis.options)
    optimizer = adam(model.parameters())
    if axis.zero:
        shard_optimizer(optimizer, model, stage=axis.zero)

    def step(number: int) -> Tensor:
        cut = shard_global_batch(batch(number), axis.micro_batches, model=model)
        with Exact():
            return train_step(model, cut)

    steps = (partial(step, number) for number in range(STEPS))
    return "trained", *max(gaps(model, optimizer, steps, expected))

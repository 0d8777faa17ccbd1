"""One cell on one rank: train on the layout, and compare everything with one process."""

from __future__ import annotations

import warnings

import transformers
from exactly import Exact

from scaletorch.compose import (
    full_gradients,
    full_state_dict,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.errors import MismatchError, ScaletorchError
from scaletorch.dist.testing import relative_error
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)

from ..gaps import gap
from .axes import Axis
from .reference import STEPS, Reference, adam, batch, build

# A rank's result: how it ended ("trained", "refused", "heard" of another's refusal), the largest
# error, and its place or the error's words.
Said = tuple[str, float, str]


def run_cell(name: str, axis: Axis, expected: Reference) -> Said:
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


def _train(name: str, axis: Axis, expected: Reference, manager: ProcessGroupManager) -> Said:
    plain = build(name)
    with Exact():  # a forward suggests the plan of a family without one
        model = parallelize(plain, manager, **axis.options)
    optimizer = adam(model.parameters())
    if axis.zero:
        shard_optimizer(optimizer, model, stage=axis.zero)
    errors: list[tuple[float, str]] = []
    for step in range(STEPS):
        micro_batches = shard_global_batch(batch(step), axis.micro_batches, model=model)
        optimizer.zero_grad()
        with Exact():
            loss = train_step(model, micro_batches)
        errors.append((relative_error(loss, expected.losses[step]), "loss"))
        errors.append(gap(full_gradients(model), expected.gradients[step]))
        optimizer.step()
    errors.append(gap(full_state_dict(model), expected.weights))
    return "trained", *max(errors)

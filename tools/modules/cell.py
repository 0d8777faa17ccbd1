"""One module on one layout, as one rank: train, and compare everything with one process."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
from refusals.layouts import Layout
from torch import Tensor, nn

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import ScaletorchError
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

from ..gaps import Figures, gap, gaps, train_alone
from .losses import batch, count_of, loss_of
from .model import hook_layers, make, split_of
from .plan import plan_of
from .recipe import Recipe

STEPS, RATE, BOUND = 2, 0.02, 1e-9


class Told(NamedTuple):
    """A rank's result."""

    kind: str  # "right", "wrong", "refused", or "rehearsal" if the rehearsal refused
    words: str  # the reason, or the tensor that differs
    error: float = 0.0
    warned: tuple[str, ...] = ()  # warnings, and tensors that the rehearsal did not compare


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained or [torch.zeros(1)], lr=RATE)  # all of a stage may be frozen


def refer(recipe: Recipe, seed: int, depth: int) -> Figures:
    """Train a module in this process.

    Raises:
        ValueError: Its values grow without bound, or consist of rounding errors.
    """
    expected, other = (_alone(recipe, seed, depth, noise) for noise in (0.0, 1e-14))
    pairs = zip(other.gradients, expected.gradients, strict=True)
    error, where = max(gap(found, right) for found, right in pairs)
    if not error < BOUND / 10 or not all(abs(loss) < 1e3 for loss in expected.losses):
        raise ValueError(f"rounding changes {where} by {error:.0e}, losses are {expected.losses}")
    return expected


def _alone(recipe: Recipe, seed: int, depth: int, noise: float) -> Figures:
    """Train in one process, with noise added to the weights."""
    model = make(recipe, seed, depth)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + noise * torch.randn_like(parameter))
    if recipe["calls"] == "late_hook":
        hook_layers(model)
    loss_fn, optimizer = loss_of(recipe["loss"], model, whole=True), _optimizer(model)

    def step(number: int) -> Tensor:
        whole = batch(seed, number)
        total, count = loss_fn(model(whole["input_ids"]), whole)
        loss: Tensor = total / count
        loss.backward()
        return loss

    return train_alone(model, optimizer, (partial(step, number) for number in range(STEPS)))


def _train(
    recipe: Recipe, seed: int, layout: Layout, expected: Figures, rehearse: bool
) -> tuple[float, str]:
    """Return the largest error on this layout, and its tensor."""
    manager = setup_process_group_manager(**layout.sizes)
    plain = make(recipe, seed, layout.depth)
    own: dict[str, Any] = {}
    if recipe["loss"] != "tokens":
        own = {"loss_fn": loss_of(recipe["loss"], plain), "count_fn": count_of(recipe["loss"])}
    options: dict[str, Any] = {"rehearse": rehearse}
    if manager.tp_size > 1:
        options["plan"] = plan_of(recipe)
    if recipe["layers"] != "list":
        options["split"] = split_of(plain)
    model = parallelize(plain, manager, **layout.options, **options)
    if recipe["calls"] == "late_hook":
        hook_layers(model)
    optimizer = _optimizer(model)
    if layout.zero:
        shard_optimizer(optimizer, model, stage=layout.zero)

    def step(number: int) -> Tensor:
        cut = shard_global_batch(batch(seed, number), layout.micro_batches, model=model)
        return train_step(model, cut, **own)

    steps = (partial(step, number) for number in range(STEPS))
    errors = gaps(model, optimizer, steps, expected)
    far = [each for each in errors if not each[0] < BOUND]
    return far[0] if far else max(errors)  # the first one is the most informative


def cell(
    recipe: Recipe, seed: int, layout: Layout, expected: Figures, *, rehearse: bool = True
) -> Told:
    """Return the result of a module; only refusals are caught, other errors are raised."""
    said = io.StringIO()  # a rehearsal reports here what it compared
    with warnings.catch_warnings(record=True) as heard, contextlib.redirect_stderr(said):
        warnings.simplefilter("always")
        try:
            error, where = _train(recipe, seed, layout, expected, rehearse)
        except ScaletorchError as refusal:
            by = type(refusal).__name__
            return Told("rehearsal" if by == "RehearsalError" else "refused", f"{by}: {refusal}")
        finally:
            destroy_process_group_manager()
    warned = dict.fromkeys(str(warning.message) for warning in heard)
    warned |= dict.fromkeys(re.findall("not compared: .*", said.getvalue()))
    return Told("right" if error < BOUND else "wrong", where, error, (*warned,))

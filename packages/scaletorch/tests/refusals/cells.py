"""Training a model on a layout, beside one process."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from training import Figures, grid, require_alike

from scaletorch.compose import (
    full_gradients,
    full_state_dict,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import get_rank
from scaletorch.dist.errors import ScaletorchError
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import ProcessGroupManager

from .layouts import Layout
from .models import PLAN
from .rows import CASES, FOUND, Case, left_alone, nothing

RATE, BOUND = 0.1, 1e-10
Told = tuple[str, str]  # "right", "refused", "wrong" or "obscure", and what came


def names() -> list[tuple[str, str]]:
    return [(row, name) for row, cases in CASES.items() for name in cases]


def steps(case: Case) -> range:
    changes = case.gradients, case.weights
    return range(1 if case.later is nothing and changes == (left_alone,) * 2 else 2)


def build(case: Case, depth: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = case.make(depth).double()
    for parameter in model.parameters():  # attention is not uniform
        parameter.data.mul_(2.0 if parameter.ndim == 2 else 1.0)
    return model


def plain_loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    output = model(**{name: x for name, x in batch.items() if name != "labels"})
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@cache
def reference(row: str, name: str, depth: int) -> Figures:
    """Train in one process."""
    case, found = CASES[row][name], Figures([], [], [], [], {})
    model = build(case, depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in steps(case):
        loss = plain_loss(model, case.batch(step))
        loss.backward()
        found.losses.append(loss.item())
        named = model.named_parameters(remove_duplicate=False)
        found.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        case.gradients(model)
        optimizer.step()
        case.weights(model)
        optimizer.zero_grad()
    return found._replace(weights={n: x.detach() for n, x in model.state_dict().items()})


def train(case: Case, layout: Layout, manager: ProcessGroupManager) -> Figures:
    """Train on this layout."""
    model = build(case, layout.depth)
    for layer in model.layers if layout.compiled else ():
        layer.compile(backend="eager")
    plan = {"plan": PLAN} if manager.tp_size > 1 else {}
    found_so = case.words.startswith(FOUND) and case.refused(layout.features)
    asked = layout.ranks == 2 or found_so  # what else four ranks refuse is seen before
    options = {"rehearse": asked, **plan, **layout.options, **case.options()}
    parallel = parallelize(model, manager, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    if layout.zero:
        shard_optimizer(optimizer, parallel, stage=layout.zero)
    found = Figures([], [], [], [], {})
    for step in steps(case):
        told: dict[str, Any] = {"model": parallel, **case.cut()}
        if "cp_layout" in told:  # the batch is for another model
            other = {**options, "cp_method": "ring", "rehearse": False}
            order = {"cp_layout": told.pop("cp_layout")}
            told["model"] = parallelize(build(case, layout.depth), manager, **{**other, **order})
        batches = shard_global_batch(case.batch(step), layout.micro_batches, **told)
        change = case.later if step and get_rank() == 1 else nothing
        with change(parallel, batches):
            loss = train_step(parallel, batches)
        found.losses.append(loss.item())
        found.gradients.append(full_gradients(parallel))
        case.gradients(parallel)
        optimizer.step()
        case.weights(parallel)
        optimizer.zero_grad()
    return found._replace(weights=full_state_dict(parallel))


def cell(row: str, name: str, layout: Layout) -> Told:
    """Return whether a model trains as in one process, or what is said of it."""
    try:
        with grid(layout.sizes) as manager:
            found = train(CASES[row][name], layout, manager)
        require_alike(found, reference(row, name, layout.depth), BOUND)
        return "right", ""
    except AssertionError as error:
        return "wrong", str(error)
    except ScaletorchError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames))
        return "obscure", f"{type(error).__name__}: {error} @ {where}"


def cells(cases: Iterable[tuple[str, str]], layout: Layout) -> list[Told]:
    """Return that of several models, as one rank of the layout."""
    torch._dynamo.reset() if layout.compiled else None
    return [cell(row, name, layout) for row, name in cases]

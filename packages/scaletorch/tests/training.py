"""A few steps on a layout and in one process, with all their figures side by side."""

from __future__ import annotations

import math
from contextlib import contextmanager
from itertools import combinations
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from scaletorch.checkpoint import load, save
from scaletorch.compose import (
    check_replicas,
    clip_grad_norm_,
    eval_step,
    full_gradients,
    full_state_dict,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

ZERO = 1e-12  # what is smaller, such as gradients of keys' biases, is rounding
EXPERTS = ("ep_size", "etp_size")  # whose ranks are among those of the other axes
FOUR = {  # the layouts of four ranks
    **{f"{axis} 4": {f"{axis}_size": 4} for axis in ("dp", "tp", "cp", "pp")},
    **{
        f"{one} 2 x {other} 2": {f"{one}_size": 2, f"{other}_size": 2}
        for one, other in combinations(("dp", "tp", "cp", "pp"), 2)
    },
}

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2,
}  # fmt: skip


def llama(seed=0, **sizes):
    torch.manual_seed(seed)
    return Llama(LlamaConfig(**{**SIZES, **sizes}))


def tokens(step=0, rows=4, length=8, words=32):
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(words, (rows, length + 1), generator=generator)
    return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:].clone()}


class Figures(NamedTuple):
    """What came of the steps; `evaluations` are of each step's batch, after the update."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    evaluations: list[float]
    weights: dict[str, torch.Tensor]


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def adamw(model):
    """Of gradients that are nearly nothing (keys' biases) a small eps would magnify rounding."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-5)


def cross_entropy(output, batch):
    logits, labels = getattr(output, "logits", output), batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def in_one_process(model, batches, make=sgd, *, loss_fn=cross_entropy, clip=math.inf):
    """Train a plain model in plain torch; batches are mappings of what its forward takes."""
    optimizer, found = make(model), Figures([], [], [], [], {})
    for batch in batches:
        given = {n: x for n, x in batch.items() if n != "labels" and not n.startswith("loss_")}
        total, count = loss_fn(model(**given), batch)
        loss = total / count
        loss.backward()
        found.losses.append(loss.item())
        named = model.named_parameters(remove_duplicate=False)
        found.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            total, count = loss_fn(model(**given), batch)
            model.train()
        found.evaluations.append((total / count).item())
    return found._replace(weights={n: x.detach() for n, x in model.state_dict().items()})


def take_steps(model, optimizer, batches, micro_batches=1, *, cut=None, clip=math.inf, **losses):
    """Train what `parallelize` returned on whole batches; `cut` is said to `shard_global_batch`."""
    found = Figures([], [], [], [], {})
    for batch in batches:
        parts = shard_global_batch(batch, micro_batches, model=model, **(cut or {}))
        found.losses.append(train_step(model, parts, **losses).item())
        found.gradients.append({n: g.clone() for n, g in full_gradients(model).items()})
        found.norms.append(float(clip_grad_norm_(model, clip)))
        optimizer.step()
        optimizer.zero_grad()
        found.evaluations.append(eval_step(model, parts, loss_fn=losses.get("loss_fn")).item())
    check_replicas(model)
    return found._replace(weights=full_state_dict(model))


def sizes_of(layout):
    """Return the sizes of dp, pp, cp and tp ranks by the names of `setup_process_group_manager`."""
    return dict(zip(("dp_size", "pp_size", "cp_size", "tp_size"), layout, strict=True))


@contextmanager
def grid(sizes=(), **axes):
    """Yield a process group manager for sizes, and destroy it afterwards."""
    try:
        yield setup_process_group_manager(**dict(sizes), **axes)
    finally:
        destroy_process_group_manager()


def on_a_layout(
    build,
    sizes,
    batches,
    make=sgd,
    *,
    options=None,
    micro_batches=1,
    stage=0,
    rehearse=False,
    load_from=None,
    save_to=None,
    **how,
):
    """Do all of that on this rank, of a model that `build` returns; from a checkpoint, or to one.

    Parameters are changed before a checkpoint is loaded, so that what is not loaded shows.
    """
    with grid(sizes) as manager:
        model = parallelize(build(), manager, **(options or {}), rehearse=rehearse)
        optimizer = make(model)
        if stage:
            shard_optimizer(optimizer, model, stage=stage)
        if load_from:
            for parameter in model.parameters():
                parameter.data.fill_(0.5)
            load(load_from, model, optimizer)
        found = take_steps(model, optimizer, batches, micro_batches, **how)
        if save_to:
            save(save_to, model, optimizer, step=len(batches))
        return found


def ranks_of(sizes):
    return math.prod(size for axis, size in sizes.items() if axis not in EXPERTS)


def train_and_compare(expected, build, sizes, batches, make=sgd, *, bounds=None, **how):
    """Train on as many ranks as the layout has; compare what each has found with one process."""
    found = run_ranks(on_a_layout, ranks_of(sizes), build, sizes, batches, make, timeout=200, **how)
    for rank, figures in enumerate(found):
        require_alike(figures, expected, **(bounds or {}), where=(rank, sizes, how))


def go_on_and_compare(expected, build, places, batches, make, folder, *, bounds=None, **how):
    """Train on one layout up to the last batch, on another one with that; each has a ZeRO stage."""
    last = Figures(*(each[-1:] for each in expected[:-1]), expected.weights)
    (first, stage), (second, later) = places
    saved, loaded = {"stage": stage, "save_to": folder}, {"stage": later, "load_from": folder}
    given = build, first, batches[:-1], make
    run_ranks(on_a_layout, ranks_of(first), *given, timeout=200, **saved, **how)
    given = build, second, batches[-1:], make
    found = run_ranks(on_a_layout, ranks_of(second), *given, timeout=200, **loaded, **how)
    for rank, figures in enumerate(found):
        require_alike(figures, last, **(bounds or {}), where=(rank, places))


def require_alike(
    found, expected, bound=1e-11, *, losses=None, norms=None, weights=None, least=0.0, where=""
):
    """Compare a rank's figures with one process's: relative errors, `bound` if no other is given.

    Errors of gradients and weights are relative to `least` at least.
    """
    for kind, most in (("losses", losses), ("norms", norms), ("evaluations", None)):
        pairs = zip(getattr(found, kind), getattr(expected, kind), strict=True)
        for step, (ours, theirs) in enumerate(pairs):
            assert abs(ours - theirs) <= (most or bound) * abs(theirs), (kind, step, where)
    for step, (ours, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        for name in ours.keys() | theirs.keys():
            error = error_of(ours.get(name), theirs.get(name), least)
            assert error < bound, (name, step, error, where)
    assert found.weights.keys() == expected.weights.keys(), where
    for name, weight in expected.weights.items():
        error = error_of(found.weights[name], weight, least)
        assert error < (weights or bound), (name, error, where)


def error_of(found, expected, least=0.0):
    """Return the largest relative error; of what is zero or missing in one process, none."""
    nothing = expected is None or is_zero(expected)
    if nothing and (found is None or is_zero(found)):
        return 0.0
    if nothing or found is None:
        return math.inf
    if expected.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    size = torch.tensor(max(expected.abs().max().item(), least), dtype=torch.float64)
    return relative_error(found, expected, scale=size)


def is_zero(tensor):
    return not tensor.numel() or bool(tensor.abs().max() < ZERO)

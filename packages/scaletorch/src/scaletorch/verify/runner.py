"""One case on its ranks: each trains, and compares its shards with one process's run."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compose import (
    clip_grad_norm_,
    full_state_dict,
    global_grad_norm,
    local_gradients,
    parallelize,
    seed_ranks,
    shard_global_batch,
    train_step,
    whole_matrices,
)
from ..dist import RankFailedError, all_gather_object, get_rank
from ..dist.errors import InvalidArgumentError, MismatchError, ScaletorchError
from ..parallel.context_parallel.building import expect_attention
from ..parallel.data_parallel import DataParallelBucket, shard_optimizer
from ..parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from ..parallel.tensor_parallel import load_full_state_dict
from . import dropout
from .cases import Case
from .device import in_dtype, moved, rank_device
from .differences import (
    Difference,
    Exact,
    compare_number,
    compare_tensors,
    doubled,
    missing,
    own_shard,
    unlike,
)
from .expert_choices import Choice, by_scores, decided
from .precision import full_precision, model_precision
from .problem import MAX_NORM, TORCH_DTYPES, Phase, Subject, phase_at

SHOWN = 3  # failures that a rank reports
RECOMPUTE: Mapping[str, bool | str] = {"none": False, "layers": True, "selective": "selective"}
SHARDED: Mapping[str, Mapping[str, Any]] = {
    "zero1": {"stage": 1, "overlap": True},
    "zero2": {"stage": 2, "overlap": True},
    "zero1_waiting": {"stage": 1},
}


@dataclass(frozen=True, slots=True)
class RankReport:
    """The findings of one rank."""

    compared: int  # number of tensors that it compared
    worst: Difference  # the comparison nearest to its bound, or furthest beyond it
    # differences that rounding does not explain, the first and largest `SHOWN` of them
    failures: list[Difference]
    # the margins of tokens sent to one process's experts, since rounding would have chosen others
    replayed: list[float] = field(default_factory=list)


def run_case(case: Case, subject: Subject, reference: str) -> RankReport:
    """Train as one rank of `case` and compare every step with the `reference` file's."""
    grid, sent = case.grid, list[float]()
    device = rank_device(subject.device)
    manager = setup_process_group_manager(grid.tp, grid.cp, grid.pp, grid.dp, grid.ep, grid.etp)
    try:
        saved = moved(load_reference(reference), device)
        with full_precision(subject.device):
            found = list(compare_case(case, subject, saved, manager, sent))
    finally:
        destroy_process_group_manager()
    found = [replace(difference, rank=get_rank()) for difference in found]
    # The earliest failure matters most: the loss before gradients, then the largest difference.
    failures = sorted(
        (difference for difference in found if difference.failed),
        key=lambda difference: (difference.step, difference.what != "loss", -difference.severity),
    )
    worst = max(found, key=lambda difference: difference.severity)
    return RankReport(len(found), worst, failures[:SHOWN], sent)


@functools.lru_cache(maxsize=8)
def load_reference(path: str) -> Mapping[str, Any]:
    """Load the reference of one process. Its tensors are shared, on the CPU: do not change them."""
    saved: Mapping[str, Any] = torch.load(path, weights_only=True, mmap=True)
    return saved


def compare_case(
    case: Case, subject: Subject, saved: Mapping[str, Any], manager: ProcessGroupManager,
    sent: list[float],
) -> Iterator[Difference]:  # fmt: skip
    """Build the model, and compare its initial weights, its training and its dropout.

    `sent` gets the margins of tokens that are sent to one process's experts.
    """
    device = next(x.device for x in saved["batches"][0].values() if isinstance(x, Tensor))
    model = subject.model(case.dtype, device)
    whole, shard = {"weights": saved["state"]}, own_shard(model)
    yield from compare_tensors("initial weight", 0, model.state_dict(), whole, 0.0, shard=shard)
    load_full_state_dict(model, saved["state"])
    with refusing():
        parallel = build(case, model, subject, manager)
        divide(case, subject, saved["batches"][0], parallel)
    dropout.switch(parallel, on=False)
    sound = yield from train_and_compare(case, parallel, manager, saved, subject, sent)
    if sound and saved["dropout"]:
        yield from compare_dropout(case, parallel, manager, saved, subject)


class RefusedError(ScaletorchError):
    """The library refuses a case before its first step is done."""


@contextmanager
def refusing() -> Iterator[None]:
    """Raise a `RefusedError` in place of errors about arguments that do not work together."""
    try:
        yield
    except InvalidArgumentError as error:
        raise RefusedError(str(error)) from error


def refusal(error: RankFailedError, world_size: int) -> str:
    """Return the reason why all ranks refuse a case, in one line, or '' for any other error.

    Ranks that hear of another's reason have a mismatch. Mismatches alone mean that ranks disagree,
    which is a fault.
    """
    found = error.exceptions.values()
    own = [str(each) for each in found if isinstance(each, RefusedError)]
    heard = [each for each in found if isinstance(each, MismatchError)]
    return own[0].split("\n", 1)[0] if own and len(own + heard) == world_size else ""


def build(
    case: Case, model: nn.Module, subject: Subject, manager: ProcessGroupManager
) -> DataParallelBucket:
    """Return the model on the case's layout, with its options."""
    parallel = parallelize(
        model,
        manager,
        plan=subject.plan,
        split=subject.split,
        schedule=case.schedule,
        bucket_size=case.bucket_size,
        recompute=RECOMPUTE[case.recompute],
        sequence_parallel=case.sequence_parallel == "on",
        loss_parallel=case.loss_parallel == "on",
        cp_layout=case.cp_layout,
        cp_method=case.cp_method,
        data_parallel={"grad_type": torch.float64} if case.data_parallel == "float64" else None,
        rehearse=False,  # the proof compares everything anyway
    )
    expect_attention(parallel, False)
    return parallel


def divide(
    case: Case, subject: Subject, batch: Mapping[str, Any], model: DataParallelBucket
) -> list[Mapping[str, Tensor]]:
    """Return this rank's micro-batches of a global batch."""
    batch = in_dtype(batch, TORCH_DTYPES[case.dtype])
    return shard_global_batch(
        batch, case.micro_batches, model=model,
        row_dims=subject.row_dims, sequence_dims=subject.sequence_dims,
    )  # fmt: skip


def train_and_compare(
    case: Case,
    model: DataParallelBucket,
    manager: ProcessGroupManager,
    saved: Mapping[str, Any],
    subject: Subject,
    sent: list[float],
) -> Generator[Difference, None, bool]:
    """Train; compare this rank's shards after each step, and the whole weights at the end.

    Stops and returns False after the first step with a fault: later steps inherit its errors.
    """
    mine = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stages, dtype = all_gather_object(mine, manager.pp_group), TORCH_DTYPES[case.dtype]
    yield from doubled(stages, model.tied_parameters, saved["limits"][0])
    for step, theirs in enumerate(saved["steps"]):
        limit, exact = saved["limits"][step], saved["exact"][step]
        phase, first = phase_at(step, subject.phases)
        may_refuse = refusing if step == 0 else nullcontext
        if first:
            with may_refuse():
                optimizers = optimizers_of(case, phase, model)
        with may_refuse(), choosing(saved, step, sent), model_precision(dtype):
            batches = divide(case, subject, saved["batches"][step], model)
            loss = train_step(model, batches, manager, loss_fn=subject.loss)
        found = [compare_number("loss", step, loss, theirs["loss"], limit, exact)]
        found += compare_gradients(step, model, theirs, stages, limit, manager, exact)
        norm = norm_of(model, manager, clips=phase.clips)
        found.append(compare_number("norm", step, norm, theirs["norm"], limit, exact))
        with may_refuse():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        weights, shard = model.state_dict(), own_shard(model)
        found += compare_tensors("weight", step, weights, theirs, limit, exact, shard)
        yield from found
        if any(all_gather_object(any(difference.failed for difference in found))):
            return False
    weights = moved(full_state_dict(model, manager), loss.device)  # from the CPU
    yield from missing("whole weight", step, weights, theirs["weights"], limit)
    yield from compare_tensors("whole weight", step, weights, theirs, limit, exact)
    return True


def choosing(
    saved: Mapping[str, Any], step: int, sent: list[float]
) -> AbstractContextManager[None]:
    """Choose experts as one process did in a step if rounding would not, see `by_scores`."""
    near = [Choice(*each) for each in saved["doubtful"][step]]
    return decided(by_scores(near, saved["limits"][step], sent)) if near else nullcontext()


def optimizers_of(case: Case, phase: Phase, model: DataParallelBucket) -> Sequence[Optimizer]:
    """Return a phase's optimizers of this rank's parameters, sharded if the case requires it."""
    optimizers = phase.make(model.parameters())
    for optimizer in optimizers:
        if options := SHARDED.get(case.data_parallel):
            shard_optimizer(optimizer, model, **options)
        whole_matrices(optimizer, model)
    return optimizers


def norm_of(model: DataParallelBucket, manager: ProcessGroupManager, *, clips: bool) -> Tensor:
    """Return the norm of the whole gradient; clip the gradient if `clips` is set."""
    if clips:
        return clip_grad_norm_(model, MAX_NORM, manager)
    return global_grad_norm(model, manager)


def compare_gradients(
    step: int,
    model: DataParallelBucket,
    theirs: Mapping[str, Any],
    stages: Iterable[set[str]],
    limit: float,
    manager: ProcessGroupManager,
    exact: Exact,
) -> Iterator[Difference]:
    """Compare this rank's gradients with one process's, and with those of its replicas."""
    gradients, expected = local_gradients(model), set(theirs["gradients"])
    mine = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from missing("gradient", step, set().union(*stages), expected, limit)
    yield from missing("gradient", step, gradients, expected & mine, limit)
    yield from compare_tensors("gradient", step, gradients, theirs, limit, exact, own_shard(model))
    yield from unlike("gradient", step, model, gradients, manager, limit)


def compare_dropout(
    case: Case,
    model: DataParallelBucket,
    manager: ProcessGroupManager,
    saved: Mapping[str, Any],
    subject: Subject,
) -> Iterator[Difference]:
    """Run one more step with dropout on, and compare the elements that ranks drop."""
    dropout.switch(model, on=True)
    seed_ranks(0, manager)
    with dropout.recorded(model, (manager.dp_rank, manager.cp_rank)) as draws:
        batches = divide(case, subject, saved["batches"][0], model)
        train_step(model, batches, manager, loss_fn=subject.loss)
    yield from dropout.judge(draws, len(saved["steps"]))

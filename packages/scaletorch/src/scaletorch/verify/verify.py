"""The proof: train every case on its layout, and report each difference from one process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compose.entries import RowDims
from ..compose.experts import count_experts
from ..compose.naming import parse_layout
from ..compose.one_process import entries_for
from ..compose.own_loss import LossFunction
from ..compose.summation import chain_length
from ..dist import RankFailedError, RankPool
from ..dist.building import locate
from ..dist.errors import InvalidArgumentError
from ..dist.testing import preload
from ..parallel.pg_manager import Grid
from ..parallel.pipeline_parallel import Split
from .cases import DTYPES, Case, choose_layouts, enumerate_cases
from .device import choose_where, moved, name_of, named, repeating
from .differences import LOW, blind, bound, score_error
from .precision import full_precision
from .problem import (
    PHASES,
    STEPS,
    TORCH_DTYPES,
    Batch,
    BatchFn,
    Chosen,
    ModelFn,
    Phase,
    Step,
    Subject,
    begin,
    default_batch,
    default_model,
    doubts,
    one_process,
    phases_of,
)
from .report import CaseResult, Report
from .runner import RankReport, refusal, run_case

Progress = Callable[[CaseResult], None]
Layout = str | Grid


class Task(NamedTuple):
    """A case and the function that each of its ranks runs: `run(case, *arguments)`."""

    case: Case
    run: Callable[..., RankReport]
    arguments: tuple[Any, ...]


def verify(
    model_fn: ModelFn = default_model,
    batch_fn: BatchFn = default_batch,
    *,
    layouts: Iterable[Grid] | None = None,
    world_size: int | None = None,
    ep: Iterable[int] | None = None,
    dtype: str | Sequence[str] = DTYPES,
    options: Mapping[str, Sequence[str | int]] | None = None,
    plan: Mapping[str, Any] | None = None, split: Split | None = None,
    row_dims: RowDims | None = None, sequence_dims: RowDims | None = None,
    loss_fn: LossFunction | None = None, optimizer: Callable[..., Optimizer] | None = None,
    optimizer_args: Mapping[str, Any] | None = None,
    timeout: float = 120.0, device: str | None = None, backend: str | None = None,
    progress: Progress | None = None,
) -> Report:  # fmt: skip
    """Train a plain module on many layouts and compare each with one process.

    Every rank compares the loss, gradients, gradient norm and weights after each of four steps.

    Args:
        model_fn: Module-level function that makes the plain module, on the CPU.
        batch_fn: Returns a step's batch, as `shard_global_batch` takes it; labels are aligned.
        layouts: The grids to try; None is every layout of `world_size`.
        world_size: Number of ranks, if `layouts` is None.
        ep: Expert parallel sizes to cross the layouts with; None is that of `layouts`, or all.
        dtype: 'float64', 'float32' (both by default), 'bfloat16', or several of them.
        options: Values of `cases.OPTIONS` to try; options left out keep their defaults.
        plan: As for `parallelize`; None recognises the model's family and its experts.
        split: Pipeline split; None infers it from the module.
        row_dims: As for `shard_global_batch`.
        sequence_dims: As for `shard_global_batch`.
        loss_fn: Module-level function, as for `train_step`; None is the cross entropy of tokens.
        optimizer: Module-level, see `problem.Chosen`; None is SGD for two steps, then AdamW.
        optimizer_args: Its arguments besides the parameters.
        timeout: Seconds for one case.
        device: 'cpu', or the kind of this machine's accelerator; None is the latter if it exists.
        backend: Backend of the ranks; None is the device's. Ranks share devices if too few.
        progress: Called with each case's result.

    Returns:
        The report. A refused case fails if `layouts` name it. Dtypes that hide faults do not run.

    Raises:
        InvalidArgumentError: No layouts, unknown options, a wrong ep, no such optimizer or device.
    """
    where, model = choose_where(device, backend), model_fn()
    known = {type(module).__module__ for module in model.modules()}  # some are slow to import
    preload("torch._dynamo", *sorted(name for name in known if name.startswith("transformers.")))
    grids = choose_layouts(layouts, world_size, ep, count_experts(model, plan))
    cases = [*enumerate_cases(grids, [dtype] if isinstance(dtype, str) else dtype, options or {})]
    chain = chain_length(model, _first(entries_for(model, batch_fn(0))))
    subject = Subject(
        locate(model_fn), plan, split, _phases(optimizer, optimizer_args, model), where.device,
        row_dims, sequence_dims, None if loss_fn is None else locate(loss_fn),
    )  # fmt: skip
    judged = _judged(cases, chain, subject, batch_fn, timeout, where.backend)
    with full_precision(where.device):
        results = [*_shown(judged, progress)]
    return Report(results, chain, layouts is not None, repeating(device, backend), where)


def _shown(results: Iterable[CaseResult], progress: Progress | None) -> Iterator[CaseResult]:
    for result in results:
        if progress is not None:
            progress(result)
        yield result


def _phases(
    optimizer: Callable[..., Optimizer] | None, options: Mapping[str, Any] | None, model: nn.Module
) -> tuple[Phase, ...]:
    """Return the phases for an optimizer; refuse one that cannot be made or needs a closure."""
    if optimizer is None:
        return PHASES
    chosen = Chosen(locate(optimizer), dict(options or {}))
    try:
        for each in chosen(model.parameters()):
            signature(each.step).bind()
    except (TypeError, ValueError) as error:
        name = getattr(optimizer, "__name__", str(optimizer))
        raise InvalidArgumentError(
            f"{name} with arguments {dict(options or {})} cannot train this model by step() alone: "
            f"{error}"
        ) from error
    return phases_of(chosen)


def _judged(
    cases: Sequence[Case],
    chain: int,
    subject: Subject,
    batch_fn: BatchFn,
    timeout: float,
    backend: str,
) -> Iterator[CaseResult]:
    """Yield each case's result; cases whose dtype would hide faults are not run."""
    why = {case.dtype: blind(TORCH_DTYPES[case.dtype], chain, STEPS) for case in cases}
    with tempfile.TemporaryDirectory(prefix="scaletorch-verify-") as folder:
        given = {
            name: (subject, save_reference(Path(folder, name), subject, batch_fn, name))
            for name, reason in why.items()
            if not reason
        }
        tasks = [Task(case, run_case, given[case.dtype]) for case in cases if case.dtype in given]
        yield from run_all(tasks, timeout, backend)
    for case in cases:
        if reason := why[case.dtype]:
            yield CaseResult(case, 0.0, [], unjudged=reason)


def save_reference(path: Path, subject: Subject, batch_fn: BatchFn, dtype: str) -> str:
    """Write the plain checkpoint, batches and one process's steps on the ranks' kind of device."""
    model, saved = begin(subject, batch_fn, dtype)
    chain = chain_length(model, _first(saved["batches"][0]))
    steps = one_process(subject, saved, dtype)
    limits = [bound(TORCH_DTYPES[dtype], chain, step) for step in range(STEPS)]
    exact: list[Step] = []
    if dtype == LOW:
        chosen = [choice for step in steps for choice in step.choices]
        exact = one_process(subject, saved, "float64", chosen)
        limits = [score_error(s.choices, e.choices) for s, e in zip(steps, exact, strict=True)]
    saved |= {"steps": [step.saved for step in steps]}
    saved |= {"exact": [step.saved for step in exact] or STEPS * [None]}
    torch.save(moved(saved | doubts(steps, limits, dtype), "cpu"), path)
    return str(path)


def _first(entries: Mapping[str, Any]) -> Tensor:
    return next(x for x in entries.values() if isinstance(x, Tensor))


@contextmanager
def reused_ranks(timeout: float, backend: str = "gloo") -> Iterator[Callable[[int], RankPool]]:
    """Yield a function of a number of ranks that returns a pool, the last one if it is healthy."""
    pool: RankPool | None = None
    with ExitStack() as opened:

        def pool_of(size: int) -> RankPool:
            nonlocal pool
            if pool is None or not pool.reusable or pool.world_size != size:
                opened.close()
                made = RankPool(size, backend=backend, timeout=timeout, seed=0)
                pool = opened.enter_context(made)
            return pool

        yield pool_of


def run_all(tasks: Iterable[Task], timeout: float, backend: str = "gloo") -> Iterator[CaseResult]:
    """Run tasks one after another, and yield each result; ranks are reused."""
    with reused_ranks(timeout, backend) as pool_of:
        for case, run, arguments in tasks:
            pool, start = pool_of(case.grid.world_size), time.perf_counter()
            try:
                reports = pool.run(run, case, *arguments)
                yield CaseResult(case, time.perf_counter() - start, reports)
            except RankFailedError as error:
                seconds, words = time.perf_counter() - start, refusal(error, pool.world_size)
                text = "" if words else str(error)
                yield CaseResult(case, seconds, [], text, refused=words)


def assert_trains_alike(
    model: ModelFn,
    batch: Batch | BatchFn,
    layouts: Layout | Iterable[Layout],
    *,
    dtype: str | Sequence[str] = "float64",
    **settings: Any,
) -> Report:
    """Assert that a plain model trains on these layouts as in one process; see `verify`.

    Args:
        model: Module-level function, or class without arguments, that makes the plain module.
        batch: The global batch of every step, or a function of the step that returns it; see
            `verify`. Each dp rank needs at least two rows, one for each micro-batch.
        layouts: Such as "dp2", "dp2-tp2", "1x1x1x2" (DPxPPxCPxTP), a `Grid`, or several of them.
        dtype: 'float64', 'float32', 'bfloat16', or several of them.
        settings: Other arguments of `verify`, such as `options`, `plan`, `loss_fn`, `optimizer`.

    Returns:
        The report.

    Raises:
        AssertionError: A layout trains differently, fails or is refused; the text is the report.

    Example:
        >>> def test_my_model():
        ...     assert_trains_alike(MyModel, my_batch, ["dp2", "tp2", "dp2-tp2"])
    """
    __tracebackhide__ = True  # pytest leaves this frame out: the report has all details
    if isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"assert_trains_alike needs a function that makes the model, got a "
            f"{type(model).__name__}: each rank makes its own; pass the class or a function"
        )
    chosen = [layouts] if isinstance(layouts, str | Grid) else list(layouts)
    if not chosen:
        raise InvalidArgumentError("assert_trains_alike needs a layout, such as 'dp2' or 'dp2-tp2'")
    report = verify(
        model,
        batch if callable(batch) else lambda step: batch,
        layouts=[parse_layout(each) if isinstance(each, str) else each for each in chosen],
        dtype=dtype,
        **settings,
    )
    if report.passed:
        return report
    command = report.command + named({**settings, "model": model, "batch": batch})
    raise AssertionError(f"{name_of(model)}\n{replace(report, command=command)}")

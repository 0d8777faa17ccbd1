"""Run and record a model on a layout and in one process, and compare the two."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compose import local_gradients, train_step
from ..compose.entries import POSITIONS, TOKENS, RowDims
from ..compose.forward import pipeline_of
from ..compose.naming import parse_layout
from ..compose.own_loss import LossFunction
from ..compose.samples import train_unsampled
from ..dist import RankPool
from ..dist.building import locate as locator
from ..parallel.pg_manager import Grid, destroy_process_group_manager, setup_process_group_manager
from ..parallel.pipeline_parallel import Split
from ..parallel.tensor_parallel import load_full_state_dict
from ..verify import dropout, problem, runner
from ..verify.cases import Case
from ..verify.device import choose_where, moved, rank_device
from ..verify.differences import score_error
from ..verify.precision import model_precision
from ..verify.problem import STEPS, Batch, BatchFn, ModelFn, Subject, default_batch, default_model
from .compare import Report, compare_runs
from .comparison.runs import Run, load
from .comparison.verdicts import measure
from .keys import Key
from .recording.descriptions import Description, describe_grid, places_of
from .recording.tape import record

EXACT, LOW = "float64", "float32"


@dataclass(frozen=True, slots=True)
class PlainRun:
    """One process's run of a model, to compare layouts with."""

    path: str  # a file with weights and batches
    reference: Run  # the run in float64
    # rounding error of each tensor, measured in the layouts' dtype, or in float32 if that is
    # float64
    lost: Mapping[Key, float]
    steps: int  # number of recorded steps
    dropout: bool  # whether the model has dropout, which was switched off


def recording(folder: Path) -> problem.Watch:
    """Return a `problem.Watch` that records one process's steps of a plain model into a folder."""

    @contextmanager
    def watch(model: nn.Module, step: int, batch: Batch) -> Iterator[problem.Put]:
        if step == 0:
            with record(folder, model, step=-1):  # the initial weights
                pass
        with record(folder, model, step=step) as tape:
            tape.batch(_with_positions(batch))
            yield tape.put

    return watch


def record_case(
    case: Case, subject: Subject, reference: str, folder: str, steps: int
) -> list[float]:
    """Record steps of a case as one of its ranks.

    `reference` is a file with weights and batches. Tokens go to the experts of one process if
    rounding would choose others; returns the margins of these, see `verify.expert_choices`.
    """
    grid, sent, device = case.grid, list[float](), rank_device(subject.device)
    saved = moved(runner.load_reference(reference), device)
    manager = setup_process_group_manager(grid.tp, grid.cp, grid.pp, grid.dp, grid.ep, grid.etp)
    try:
        dtype = problem.TORCH_DTYPES[case.dtype]
        plain = subject.model(case.dtype, device)
        with record(folder, plain, describe=Description(places=places_of(plain)), step=-1):
            pass
        load_full_state_dict(plain, saved["state"])
        model = runner.build(case, plain, subject, manager)
        train_unsampled(model)  # skip sampled checks, so that a fault in replicas gets recorded
        dropout.switch(model, on=False)
        stage = pipeline_of(model).module
        for step in range(steps):
            phase, first = problem.phase_at(step, subject.phases)
            if first:
                optimizers = runner.optimizers_of(case, phase, model)
            batches = runner.divide(case, subject, saved["batches"][step], model)
            description = describe_grid(model, batches, manager)
            with record(folder, stage, describe=description, step=step) as tape:
                for number, batch in enumerate(batches):
                    tape.batch(batch if grid.cp > 1 else _with_positions(batch), number)
                with model_precision(dtype), runner.choosing(saved, step, sent):
                    tape.put("loss", train_step(model, batches, manager, loss_fn=subject.loss))
                tape.put_all("gradient", local_gradients(model))
                tape.put("norm", runner.norm_of(model, manager, clips=phase.clips))
                for optimizer in optimizers:
                    optimizer.step()
                tape.put_all("weight", _parameters(model))
                for optimizer in optimizers:
                    optimizer.zero_grad()
        return sent
    finally:
        destroy_process_group_manager()


def _with_positions(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a batch with the default position ids added, unless the batch has its own."""
    tokens = batch.get(TOKENS)
    if tokens is None:
        return batch
    return {POSITIONS: torch.arange(tokens.shape[1], device=tokens.device)[None], **batch}


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters as `state_dict` has them, with all updates gathered."""
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name in named}


def bisect(
    model_fn: ModelFn = default_model,
    batch_fn: BatchFn = default_batch,
    *,
    layout: str | Grid,
    dtype: str = EXACT,
    options: Mapping[str, str | int] | None = None,
    plan: Mapping[str, Any] | None = None, split: Split | None = None,
    row_dims: RowDims | None = None, sequence_dims: RowDims | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: Callable[..., Optimizer] | None = None,
    optimizer_args: Mapping[str, Any] | None = None,
    steps: int = STEPS, folder: str | Path | None = None,
    timeout: float = 120.0, device: str | None = None, backend: str | None = None,
) -> Report:  # fmt: skip
    """Train a plain module in one process and on a layout, and find the first tensor that differs.

    Args:
        model_fn: Module-level function that makes the plain module, on the CPU.
        batch_fn: Returns the global batch of a step, as for `verify`.
        layout: The grid, or its name such as "2x1x1x2".
        dtype: 'float64', 'float32' or 'bfloat16'.
        options: Values of `verify.OPTIONS`, such as `{"schedule": "zb_h1"}`.
        plan: As for `parallelize`.
        split: As for `parallelize`.
        row_dims: As for `shard_global_batch`.
        sequence_dims: As for `shard_global_batch`.
        loss_fn: Module-level function, as for `train_step`; None is the cross entropy of tokens.
        optimizer: Module-level class or function of parameters; None is those of `verify`.
        optimizer_args: Its arguments besides the parameters.
        steps: Number of steps to compare, 1 to 4.
        folder: Folder to keep the recordings in; None keeps none.
        timeout: Seconds for the layout's run.
        device: As for `verify`: None is this machine's accelerator, or the CPU if it has none.
        backend: As for `verify`.

    Returns:
        The report; `report.sound` if no result differs by more than rounding explains.

    Raises:
        RankFailedError: The layout's run fails.
        InvalidArgumentError: The layout, option, device or backend does not exist.
    """
    where = choose_where(device, backend)
    grid = parse_layout(layout) if isinstance(layout, str) else layout
    case = Case(grid, dtype=dtype, **{str(k): v for k, v in (options or {}).items()})  # type: ignore[arg-type]
    chosen = None if optimizer is None else problem.Chosen(locator(optimizer), optimizer_args or {})
    subject = Subject(
        locator(model_fn), plan, split, problem.phases_of(chosen) if chosen else problem.PHASES,
        where.device, row_dims, sequence_dims, None if loss_fn is None else locator(loss_fn),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="scaletorch-bisect-") as own:
        place = Path(own if folder is None else folder)
        prepared = prepare(place, subject, batch_fn, dtype, steps)
        with RankPool(grid.world_size, backend=where.backend, timeout=timeout, seed=0) as pool:
            return locate(case, subject, prepared, pool, place / "layout")


def prepare(
    folder: Path, subject: Subject, batch_fn: BatchFn, dtype: str, steps: int = STEPS
) -> PlainRun:
    """Run and record a model in one process twice: in float64 and in a lower dtype."""
    _, saved = problem.begin(subject, batch_fn, dtype, steps)
    low = LOW if dtype == EXACT else dtype
    rounded = problem.one_process(subject, saved, low, watch=recording(folder / "noise"))
    choices = [] if dtype == EXACT else [choice for step in rounded for choice in step.choices]
    exact = problem.one_process(subject, saved, EXACT, choices, recording(folder / "exact"))
    limits = [score_error(r.choices, e.choices) for r, e in zip(rounded, exact, strict=True)]
    torch.save(moved(saved | problem.doubts(rounded, limits, dtype), "cpu"), folder / "start.pt")
    reference = load(folder / "exact")
    lost = measure(load(folder / "noise"), reference)
    return PlainRun(str(folder / "start.pt"), reference, lost, steps, saved["dropout"])


def locate(
    case: Case,
    subject: Subject,
    prepared: PlainRun,
    pool: RankPool,
    folder: Path,
    run: Callable[..., Any] = record_case,
    *arguments: Any,
) -> Report:
    """Run and record a case on the ranks of a pool, and compare it with one process.

    `run(case, subject, file, folder, steps, *arguments)` records on each rank.
    """
    sent_along = prepared.path, str(folder), prepared.steps, *arguments
    margins: list[list[float]] = pool.run(run, case, subject, *sent_along)
    report = compare_runs(prepared.reference, load(folder), prepared.lost)
    if sent := [margin for own in margins for margin in own]:
        report.notes.append(
            f"{len(sent)} choices of experts were made as in one process, where rounding chose "
            f"others: scores that are up to {max(sent):.1e} of the largest apart"
        )
    if prepared.dropout:
        report.notes.append("dropout was off: `python -m scaletorch.verify` compares its draws")
    return report

"""Recorded training of a model, in one process and on a layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..compose import local_gradients, train_step
from ..compose.entries import POSITIONS, TOKENS
from ..compose.forward import pipeline_of
from ..compose.samples import train_unsampled
from ..parallel.pg_manager import destroy_process_group_manager, setup_process_group_manager
from ..parallel.tensor_parallel import load_full_state_dict
from ..verify import dropout, runner
from ..verify.cases import Case
from ..verify.precision import model_precision
from ..verify.problem import TORCH_DTYPES, Batch, Put, Subject, Watch, phase_at
from ..verify.where import moved, rank_device
from .recording.described import Description
from .recording.ours import describe_grid, places_of
from .recording.tape import record


def recording(folder: Path) -> Watch:
    """Return a `Watch` that records one process's steps of a plain model into a folder."""

    @contextmanager
    def watch(model: nn.Module, step: int, batch: Batch) -> Iterator[Put]:
        if step == 0:
            with record(folder, model, step=-1):  # the initial weights
                pass
        with record(folder, model, step=step) as tape:
            tape.batch(_with_positions(batch))
            yield tape.put

    return watch


class Ran(NamedTuple):
    """The facts that a rank returns in addition to its recording.

    Attributes:
        dropped: Names of dropout modules that drop wrong elements, each with the reason; a
            comparison with one process cannot show this.
        sent: Margins of the tokens that went to one process's experts, since rounding would have
            chosen others; see `verify.routing`.
    """

    dropped: list[tuple[str, str]]
    sent: list[float]


def record_case(case: Case, subject: Subject, reference: str, folder: str, steps: int) -> Ran:
    """Record steps of a case as one of its ranks.

    Tokens go to the experts of one process if rounding would choose others.

    Args:
        case: The layout and options.
        subject: The model and its training.
        reference: A file with weights and batches.
        folder: The recording's folder, the same for all ranks.
        steps: Number of steps.
    """
    grid, ran, device = case.grid, Ran([], []), rank_device(subject.device)
    saved = moved(runner.load_reference(reference), device)
    manager = setup_process_group_manager(grid.tp, grid.cp, grid.pp, grid.dp, grid.ep, grid.etp)
    try:
        dtype = TORCH_DTYPES[case.dtype]
        plain = subject.model(case.dtype, device)
        with record(folder, plain, describe=Description(places=places_of(plain)), step=-1):
            pass
        load_full_state_dict(plain, saved["state"])
        model = runner.build(case, plain, subject, manager)
        train_unsampled(model)  # skip sampled checks, so that a fault in replicas gets recorded
        dropout.switch(model, on=False)
        stage = pipeline_of(model).module
        for step in range(steps):
            phase, first = phase_at(step, subject.phases)
            if first:
                optimizers = runner.optimizers_of(case, phase, model)
            batches = runner.divide(case, subject, saved["batches"][step], model)
            said = describe_grid(model, batches, manager)
            with record(folder, stage, describe=said, step=step) as tape:
                for number, batch in enumerate(batches):
                    tape.batch(batch if grid.cp > 1 else _with_positions(batch), number)
                with model_precision(dtype), runner.choosing(saved, step, ran.sent):
                    tape.put("loss", train_step(model, batches, manager, loss_fn=subject.loss))
                tape.put_all("gradient", local_gradients(model))
                tape.norm(runner.norm_of(model, manager, clips=phase.clips))
                for optimizer in optimizers:
                    optimizer.step()
                tape.put_all("weight", _parameters(model))
                for optimizer in optimizers:
                    optimizer.zero_grad()
        if saved["dropout"]:
            numbered = {**saved, "steps": range(steps)}
            found = list(runner.compare_dropout(case, model, manager, numbered, subject))
            ran.dropped.extend((e.what.partition(" ")[2], e.note) for e in found if e.failed)
        return ran
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

"""A description of any model: each kind of its layers runs once, hollow, in each cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ...compose.entries import RowDims
from ...compose.own_loss import LossFunction
from ...dist.errors import InvalidArgumentError, ScaletorchError
from ...parallel.pipeline_parallel import Split, meta_parameters
from ..description import Behaviour, Block, Cut, Description, Kernels
from .blocks import block_of, blocks_of, inner
from .job import Job

MOST = 8  # ranks of tp, and of cp, that are tried if none is named
Batch = Mapping[str, Tensor]


def describe(
    build: Callable[[], nn.Module],
    length: int,
    *,
    cuts: Iterable[Cut] | None = None,
    batch: Callable[[int], Batch] | None = None,
    plan: Mapping[str, Any] | None = None,
    split: Split | None = None,
    row_dims: RowDims | None = None,
    sequence_dims: RowDims | None = None,
    loss_fn: LossFunction | None = None,
    name: str = "",
    kernels: Kernels = "cpu",
) -> Description:
    """Describe a model for planning; nothing is computed, and no memory of its size is taken.

    Each kind of layer is put on each cut by `parallelize` and runs in `train_step`, on tensors that
    nobody fills, as rank 0 of ranks that do not exist. Tokens are taken to be shared out evenly
    over experts. This process has no process group meanwhile.

    Args:
        build: Makes the plain module; its parameters are put on the meta device as they are made.
        length: Tokens of a sequence, or positions of another; 1 of rows that have none.
        cuts: Ways to cut it; None is `usual_cuts(8)`.
        batch: `batch(rows)`, the batch as `train_step` wants it; None is ids and labels.
        plan: As for `parallelize`.
        split: As for `parallelize`.
        row_dims: As for `shard_global_batch`.
        sequence_dims: As for `shard_global_batch`.
        loss_fn: As for `train_step`; None is the cross entropy of tokens.
        name: Of the model; by default that of its class.
        kernels: By which device's it runs: "cuda" for the cards of the table, "cpu" for ranks on
            cores of a machine.

    Raises:
        InvalidArgumentError: The model needs data to be built, has no list of layers, or cannot run
            in one process; what cuts it cannot have is `Description.refused`.
    """
    model = _built(build)
    blocks, chosen = blocks_of(model, split)
    known: dict[Cut, tuple[Behaviour, ...]] = {}
    refused: dict[Cut, str] = {}
    given = batch or _tokens(length)
    dims = {"row_dims": row_dims, "sequence_dims": sequence_dims}
    made = partial(_built, build)
    job = Job(made, model, blocks, chosen, given, plan, split, dims, loss_fn, kernels)
    for cut in dict.fromkeys((Cut(), *(usual_cuts(8) if cuts is None else cuts))):
        try:
            # Torch sets new context variables at each call of its own settings, and leaves them.
            known[cut] = copy_context().run(job.measure, cut)
        except ScaletorchError as error:
            if cut == Cut():
                raise
            refused[cut] = str(error).partition("\n")[0]
    first = next(p for p in model.parameters())
    return Description(
        name or type(model).__name__, length, str(first.dtype).removeprefix("torch."), blocks,
        known, refused, _tied(model, blocks), f"torch {torch.__version__}", kernels=kernels,
    )  # fmt: skip


def usual_cuts(
    ranks: int,
    *,
    tp: Sequence[int] | None = None,
    cp: Sequence[int] | None = None,
    ep: Sequence[int] = (1,),
    sequence_parallel: Sequence[bool] = (False, True),
    methods: Sequence[str] = ("ring",),
    selective: Sequence[bool] = (False,),
) -> list[Cut]:
    """Return the ways of cutting a model that are worth knowing, each once.

    Args:
        ranks: At most.
        tp: Sizes; None is those of up to 8 that divide the ranks.
        cp: Sizes; None is the same.
        ep: Sizes.
        sequence_parallel: Without and with.
        methods: How cp ranks attend.
        selective: Without and with selective recomputation.
    """
    sizes = [size for size in range(1, min(ranks, MOST) + 1) if ranks % size == 0]
    every = product(tp or sizes, cp or sizes, ep, sequence_parallel, methods, selective)
    found = (
        Cut(tp, cp, ep, shares and tp > 1, method if cp > 1 else "", again)
        for tp, cp, ep, shares, method, again in every
        if tp * cp <= ranks and ep <= ranks
    )
    return list(dict.fromkeys(found))


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with meta_parameters():
            model = build()
    except ScaletorchError:
        raise
    except Exception as error:  # it is the caller's
        raise InvalidArgumentError(
            "the model cannot be built without data: its parameters are on the meta device while "
            f"it is described ({type(error).__name__}: {str(error).partition(chr(10))[0]}); give a "
            "function that makes the module, loads nothing and moves it nowhere"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"the function has to return a plain nn.Module, and returned {type(model).__name__}"
        )
    return model


def _tokens(length: int) -> Callable[[int], Batch]:
    def batch(rows: int) -> Batch:
        ids = torch.zeros(rows, length, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    return batch


def _tied(model: nn.Module, blocks: Sequence[Block]) -> tuple[tuple[str, ...], ...]:
    """Return names of parameters that are one, by the kinds of their blocks."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (block := block_of(name, blocks)) is not None:
            users.setdefault(id(parameter), []).append(f"{block.kind}.{inner(name, block)}")
    return tuple(tuple(names) for names in users.values() if len(names) > 1)

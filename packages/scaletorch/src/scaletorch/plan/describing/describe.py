"""A description of any model: each kind of its layers runs once, hollow, in each cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from ...compose import parallelize, shard_global_batch, train_step
from ...compose.entries import RowDims
from ...compose.experts import expert_names
from ...compose.forward import terms_of
from ...compose.own_loss import LossFunction
from ...dist.errors import InvalidArgumentError, ScaletorchError
from ...parallel.context_parallel.building import expect_attention
from ...parallel.pg_manager import Grid, ProcessGroupManager
from ...parallel.pipeline_parallel import Split, meta_parameters
from ..description import Behaviour, Block, Cut, Description, Kernels, Parameter
from .blocks import block_of, blocks_of, fill, inner, thin_out
from .hollow import Hollow
from .kernels import kernels_of
from .meter import Meter, behaviour
from .world import pretended

MOST = 8  # ranks of tp, and of cp, that are tried if none is named
ROWS = (2, 3)  # what is affine in rows is known from two
OURS = ("torch", "scaletorch", "contextlib")  # whose lines are none of the model's
REPLICAS = 2  # of what is divided: the groups of an axis are those of no other then
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
    job = _Job(made, model, blocks, chosen, given, plan, split, dims, loss_fn, kernels)
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


@dataclass(frozen=True, slots=True)
class _Job:
    """A model to be described: the arguments of `describe`, and the model, whole.

    It is built for each run anew: what hangs on a model, such as a forward under autocast, is not
    always copied with it.
    """

    build: Callable[[], nn.Module]
    model: nn.Module
    blocks: Sequence[Block]
    chosen: Mapping[int, str]
    batch: Callable[[int], Mapping[str, Tensor]]
    plan: Mapping[str, Any] | None
    split: Split | None
    dims: Mapping[str, Any]
    loss_fn: LossFunction | None
    kernels: str

    def measure(self, cut: Cut) -> tuple[Behaviour, ...]:
        """Return how each kind behaves in a cut.

        Raises:
            ScaletorchError: The model cannot be cut so.
        """
        pair = []
        with _own_code(cut), pretended(_grid(cut)) as manager:
            for rows in ROWS:
                seen, model = self._run(cut, manager, rows)
                pair.append(seen)
            parameters = self._parameters(model)
        kinds = range(self.blocks[-1].kind + 1)
        return tuple(behaviour(kind, ROWS, pair, parameters[kind]) for kind in kinds)

    def _run(self, cut: Cut, manager: ProcessGroupManager, rows: int) -> tuple[Meter, nn.Module]:
        model = self.build()
        like = thin_out(model, self.blocks, self.chosen)
        axes = {"tp": manager.tp_group, "cp": manager.cp_group, "ep": manager.ep_group}
        seen = Meter(axes, self.blocks[-1].kind, selective=cut.selective)
        hollow = Hollow(seen)
        fill(model, hollow.make)
        with hollow, kernels_of(self.kernels):
            parallel = parallelize(
                model, manager, plan=self.plan, split=self.split,
                sequence_parallel=cut.sequence_parallel, cp_method=cut.cp_method or "ring",
                recompute="selective" if cut.selective else False,
                data_parallel={"init_sync": "none"}, rehearse=False,
            )  # fmt: skip
            expect_attention(model, False)
            terms_of(parallel).seen = 2
            batch = self.batch(rows * manager.dp_size)
            watched = seen.watch(model, self.chosen, like)
            with parallel.no_sync(), watched:
                parts = shard_global_batch(batch, 1, manager, model=parallel, **self.dims)
                train_step(parallel, parts, manager, **self._loss())
        return seen, model

    def _loss(self) -> dict[str, Any]:
        """Return what `train_step` is told of the loss: a count that has no value is not read."""
        function = self.loss_fn
        if function is None:
            return {}
        return {"loss_fn": lambda x, batch: (function(x, batch)[0], 1), "count_fn": lambda _: 1}

    def _parameters(self, model: nn.Module) -> dict[int, list[Parameter]]:
        """Return by kind what this rank holds: the first, which has the most of what is uneven."""
        whole = dict(self.model.named_parameters(remove_duplicate=False))
        experts = expert_names(model)
        found: dict[int, list[Parameter]] = {block.kind: [] for block in self.blocks}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            block = block_of(name, self.blocks)
            if block is not None and name in whole:
                elements, item = whole[name].numel(), tensor.element_size()
                found[block.kind].append(
                    Parameter(inner(name, block), elements, item, tensor.numel(), name in experts)
                )
        return found


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


def _grid(cut: Cut) -> Grid:
    """Return the smallest grid with the cut's groups, each divided thing there twice."""
    held = cut.tp * cut.cp
    dp = REPLICAS * cut.ep // math.gcd(cut.ep, held)
    return Grid(tp=cut.tp, cp=cut.cp, dp=dp, ep=cut.ep)


@contextmanager
def _own_code(cut: Cut) -> Iterator[None]:
    """Turn an error of the model's own code into one that says which, where and what to do.

    Args:
        cut: In which the model runs; `Cut()` is whole.

    Raises:
        InvalidArgumentError: Of any error that is none of this library's.
    """
    try:
        yield
    except ScaletorchError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{_place(error)}"
        if cut == Cut():
            raise InvalidArgumentError(
                f"the model cannot run on the batch: {what}; a model that takes something else "
                "than input_ids and labels needs a batch of its own (--batch)"
            ) from error
        sizes = [
            f"{axis} {size}" for axis in ("tp", "cp", "ep") if (size := getattr(cut, axis)) > 1
        ]
        raise InvalidArgumentError(f"with {', '.join(sizes)} its code fails: {what}") from error


def _place(error: Exception) -> str:
    """Return the last line of the model's that the error came through."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in OURS
    ]
    entered = frames[1:] if frames and frames[0][0].endswith("runpy>") else frames
    return f" ({Path(entered[-1][0]).name}:{entered[-1][1]})" if entered else ""

"""One cut of a model, run for two numbers of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn

from ...compose import parallelize, shard_global_batch, train_step
from ...compose.experts import expert_names
from ...compose.forward import terms_of
from ...compose.own_loss import LossFunction
from ...dist.errors import InvalidArgumentError, ScaletorchError
from ...parallel.context_parallel.building import expect_attention
from ...parallel.pg_manager import Grid, ProcessGroupManager
from ...parallel.pipeline_parallel import Split
from ...parallel.tensor_parallel import explain
from ..description import Behaviour, Block, Cut, Parameter
from .blocks import block_of, fill, inner, thin_out
from .figures import behaviour
from .hollow import Hollow
from .kernels import kernels_of
from .observed import Observed
from .watching import watch
from .world import pretended

ROWS = (2, 3)  # what is affine in rows is known from two
OURS = ("torch", "scaletorch", "contextlib")  # whose lines are none of the model's
REPLICAS = 2  # of what is divided: the groups of an axis are those of no other then


@dataclass(frozen=True, slots=True)
class Job:
    """A model to be described.

    Attributes:
        build: Makes the model on the meta device, each time anew: what hangs on it, such as a
            forward under autocast, is not always copied with it.
        model: One of these, whole.
        blocks: Its line.
        chosen: By kind, which layer is run.
        batch: Makes what `train_step` takes, of so many rows.
        plan: As for `parallelize`.
        split: As for `parallelize`.
        dims: How `shard_global_batch` is to read batches.
        loss_fn: As for `train_step`.
        kernels: Of which device, "cpu" or "cuda".
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
            parameters = self._parameters(model, cut)
        kinds = range(self.blocks[-1].kind + 1)
        return tuple(behaviour(kind, ROWS, pair, parameters[kind]) for kind in kinds)

    def _run(self, cut: Cut, manager: ProcessGroupManager, rows: int) -> tuple[Observed, nn.Module]:
        model = self.build()
        like = thin_out(model, self.blocks, self.chosen)
        axes = {"tp": manager.tp_group, "cp": manager.cp_group, "ep": manager.ep_group}
        seen = Observed(axes, self.blocks[-1].kind, selective=cut.selective)
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
            watched = watch(model, seen, self.chosen, like)
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

    def _parameters(self, model: nn.Module, cut: Cut) -> dict[int, list[Parameter]]:
        """Return by kind what this rank holds, and what the other tp ranks do."""
        others = {}
        if cut.tp > 1:
            known = explain(self.model, cut.tp, self.plan, sequence_parallel=cut.sequence_parallel)
            others = {each.name: each.local_shapes for each in known.parameters}
        whole = dict(self.model.named_parameters(remove_duplicate=False))
        experts = expert_names(model)
        found: dict[int, list[Parameter]] = {block.kind: [] for block in self.blocks}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            block = block_of(name, self.blocks)
            if block is None or name not in whole:
                continue
            local: tuple[int, ...] = (tensor.numel(),) * cut.tp
            if name in others and name not in experts:
                local = tuple(map(math.prod, others[name]))
            found[block.kind].append(
                Parameter(
                    inner(name, block), whole[name].numel(), tensor.element_size(), local,
                    name in experts,
                )
            )  # fmt: skip
        return found


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

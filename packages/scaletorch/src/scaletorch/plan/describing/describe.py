"""Describe any model: one layer of each kind runs on hollow tensors, in each cut."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from ...compose import parallelize, shard_global_batch, train_step
from ...compose.entries import RowDims
from ...compose.experts import expert_names
from ...compose.forward import terms_of
from ...compose.own_loss import LossFunction
from ...dist.errors import InvalidArgumentError, ScaletorchError
from ...parallel.context_parallel.building import expect_attention
from ...parallel.pg_manager import (
    Grid,
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from ...parallel.pipeline_parallel import Split, meta_parameters
from ...parallel.pipeline_parallel.building import PassThrough, sections_of
from ..description import Behaviour, Block, Cut, Description, Kernels, Parameter
from .hollow import Hollow, OfCuda
from .meter import Meter, behaviour, is_put_off

MOST = 8  # largest size of tp, cp and ep that is tried by default
ROWS = (2, 3)  # two row counts determine an affine function of rows
REPLICAS = 2  # replicas of sharded parameters, so that no two axes have the same groups
Batch = Mapping[str, Tensor]
IDS = ("input_ids", "labels")  # entries of the default batch


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
    kernels: Kernels = "cuda",
) -> Description:
    """Describe a model for planning, without computing and without allocating its memory.

    One layer of each kind is parallelized with each cut by `parallelize` and runs in `train_step`
    on unfilled tensors, as rank 0 of simulated ranks. Tokens are assumed to be spread evenly over
    experts. This process has a simulated process group meanwhile, so it must have none of its own.

    Args:
        build: Makes the plain module; its parameters are created on the meta device.
        length: Tokens of a sequence, or positions of another one; 1 for rows without a sequence.
        cuts: Ways to cut the model; None for `usual_cuts(8)`.
        batch: `batch(rows)` returns a batch for `train_step`; None for ids and labels.
        plan: As for `parallelize`.
        split: As for `parallelize`.
        row_dims: As for `shard_global_batch`.
        sequence_dims: As for `shard_global_batch`.
        loss_fn: As for `train_step`; None for the cross entropy of tokens.
        name: Name of the model; by default that of its class.
        kernels: Device type whose kernels run the model, whatever this machine has: "cuda" for the
            GPUs of the table, "cpu" for ranks on CPU cores.

    Raises:
        InvalidArgumentError: The model needs data to be built, has no list of layers, or cannot run
            in one process. Cuts that it cannot have go to `Description.refused` instead.
    """
    model = built(build)
    blocks, chosen = blocks_of(model, split)
    known: dict[Cut, tuple[Behaviour, ...]] = {}
    refused: dict[Cut, str] = {}
    job = _Job(
        partial(built, build), model, blocks, chosen,
        batch or (lambda rows: dict.fromkeys(IDS, torch.zeros(rows, length, dtype=torch.long))),
        plan, split, {"row_dims": row_dims, "sequence_dims": sequence_dims}, loss_fn, kernels,
    )  # fmt: skip
    for cut in dict.fromkeys((Cut(), *(usual_cuts(8) if cuts is None else cuts))):
        try:
            # Torch's settings set new context variables at each call and never remove them.
            known[cut] = copy_context().run(job.measure, cut)
        except ScaletorchError as error:
            if cut == Cut():
                raise
            refused[cut] = str(error).partition("\n")[0]
    first = next(model.parameters())
    return Description(
        name or type(model).__name__, length, str(first.dtype).removeprefix("torch."), blocks,
        known, refused, _tied(model, blocks), f"torch {torch.__version__}",
    )  # fmt: skip


def usual_cuts(
    ranks: int,
    *,
    tp: Sequence[int] | None = None,
    cp: Sequence[int] | None = None,
    ep: Sequence[int] | None = None,
    experts: int = 1,
    methods: Sequence[str] = ("ring",),
    selective: Sequence[bool] = (False,),
) -> list[Cut]:
    """Return the usual cuts of a model, without duplicates.

    Args:
        ranks: Largest number of ranks.
        tp: Sizes; None for all up to 8 that divide the ranks.
        cp: Sizes; None as for tp.
        ep: Sizes; None for those up to 8 that divide the ranks and the experts.
        experts: Number of experts in a layer.
        methods: Attention methods of context parallelism.
        selective: Values of selective recomputation to combine.
    """
    sizes = [size for size in range(1, min(ranks, MOST) + 1) if ranks % size == 0]
    shared = [size for size in sizes if experts % size == 0]
    every = product(tp or sizes, cp or sizes, ep or shared, (False, True), methods, selective)
    found = (
        Cut(tp, cp, ep, sequence and tp > 1, method if cp > 1 else "", again)
        for tp, cp, ep, sequence, method, again in every
        if tp * cp <= ranks and ep <= ranks
    )
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class _Job:
    """The arguments of `describe`, and the full model; each run builds a new one."""

    build: Callable[[], nn.Module]
    model: nn.Module
    blocks: Sequence[Block]
    chosen: Mapping[int, str]
    batch: Callable[[int], Batch]
    plan: Mapping[str, Any] | None
    split: Split | None
    dims: Mapping[str, Any]
    loss_fn: LossFunction | None
    kernels: str

    def measure(self, cut: Cut) -> tuple[Behaviour, ...]:
        """Return the behaviour of each kind in a cut; raise if the model cannot have it."""
        pair = []
        # The smallest grid with the cut's groups and two replicas of each shard.
        dp = REPLICAS * cut.ep // math.gcd(cut.ep, cut.tp * cut.cp)
        try:
            with _simulated(Grid(tp=cut.tp, cp=cut.cp, dp=dp, ep=cut.ep)) as manager:
                for rows in ROWS:
                    meter, model = self._run(cut, manager, rows)
                    pair.append(meter)
                parameters = self._parameters(model)
        except ScaletorchError:
            raise
        except Exception as error:  # raised by the model's own code
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if cut != Cut():
                raise InvalidArgumentError(f"with {cut} its code fails: {why}") from error
            raise InvalidArgumentError(
                f"the model cannot run on the batch: {why}; a model that takes something else "
                "than input_ids and labels needs a function of its batch (--batch)"
            ) from error
        return tuple(behaviour(kind, ROWS, pair, own) for kind, own in sorted(parameters.items()))

    def _run(self, cut: Cut, manager: ProcessGroupManager, rows: int) -> tuple[Meter, nn.Module]:
        model, loss, function = self.build(), dict[str, Any](), self.loss_fn
        if function is not None:  # 1 replaces the hollow token count
            own = {"loss_fn": lambda x, batch: (function(x, batch)[0], 1), "count_fn": lambda _: 1}
            loss.update(own)
        latest = thin_out(model, self.blocks, self.chosen)
        axes = {"tp": manager.tp_group, "cp": manager.cp_group, "ep": manager.ep_group}
        meter = Meter(axes, self.blocks[-1].kind, selective=cut.selective)
        hollow = Hollow(meter)
        fill(model, hollow.make)
        with hollow:
            parallel = parallelize(
                model, manager, plan=self.plan, split=self.split,
                sequence_parallel=cut.sequence_parallel, cp_method=cut.cp_method or "ring",
                recompute="selective" if cut.selective else False,
                data_parallel={"init_sync": "none"}, rehearse=False,
            )  # fmt: skip
            expect_attention(model, False)
            terms_of(parallel).seen = 2
            batch = self.batch(rows * manager.dp_size)
            watched = meter.watch(model, self.chosen, latest)
            kernels = OfCuda() if self.kernels == "cuda" else nullcontext()
            with parallel.no_sync(), watched, kernels:
                shares = shard_global_batch(batch, 1, manager, model=parallel, **self.dims)
                train_step(parallel, shares, manager, **loss)
        return meter, model

    def _parameters(self, model: nn.Module) -> dict[int, list[Parameter]]:
        """Return by kind the parameters of this rank, the first: it has the largest shards."""
        whole = dict(self.model.named_parameters(remove_duplicate=False))
        experts = expert_names(model)
        deferred = {f"{name}.weight" for name, each in model.named_modules() if is_put_off(each)}
        found: dict[int, list[Parameter]] = {block.kind: [] for block in self.blocks}
        for kind, inner, name, tensor in parameters_of(model, self.blocks):
            if name in whole:
                sizes = whole[name].numel(), tensor.element_size(), tensor.numel()
                found[kind].append(Parameter(inner, *sizes, name in experts, name in deferred))
        return found


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that a function builds, with its parameters on the meta device."""
    try:
        with meta_parameters():
            model = build()
    except ScaletorchError:
        raise
    except Exception as error:  # raised by the caller's code
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise InvalidArgumentError(
            f"the model cannot be built on the meta device, where it is described: {why}; pass a "
            "function that makes the module without loading data or moving it"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"the function must return a plain nn.Module, got {type(model).__name__}"
        )
    return model


def _tied(model: nn.Module, blocks: Sequence[Block]) -> tuple[tuple[str, ...], ...]:
    """Return groups of tied parameter names, as "kind.parameter"."""
    users: dict[int, list[str]] = {}
    for kind, inner, _, parameter in parameters_of(model, blocks):
        users.setdefault(id(parameter), []).append(f"{kind}.{inner}")
    return tuple(tuple(names) for names in users.values() if len(names) > 1)


@contextmanager
def _simulated(grid: Grid) -> Iterator[ProcessGroupManager]:
    """Become rank 0 of a grid of simulated ranks: collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if c10d.is_initialized():
        raise InvalidArgumentError(
            "describe needs a process without a process group: call it before init_dist, or in "
            "another process"
        )
    excepthook = sys.excepthook  # torch wraps it each time a process group is created
    c10d.init_process_group("fake", rank=0, world_size=grid.world_size, store=FakeStore())
    try:
        sizes = {f"{axis}_size": getattr(grid, axis) for axis in ("tp", "cp", "pp", "dp", "ep")}
        yield setup_process_group_manager(**sizes)
    finally:
        sys.excepthook = excepthook
        destroy_process_group_manager()
        if c10d.is_initialized():
            c10d.destroy_process_group()


class _Skipped(PassThrough):
    """A stand-in for a layer: returns its input, with the latest layer's other outputs."""

    def __init__(self, replaced: nn.Module, latest: list[Any]) -> None:
        super().__init__(replaced, "a layer like another")
        self._latest = latest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else next(iter(kwargs.values()), None)
        latest = self._latest[0]
        return (value, *latest[1:]) if isinstance(latest, tuple) else value

    forward = __call__


def kinds_of(layers: Sequence[nn.Module]) -> list[int]:
    """Return the kind of each layer; a kind has the same classes, shapes and settings."""
    forms = [dict(_form(layer)) for layer in layers]
    # Ignore attributes that hold the layer's index.
    places = {
        key for key in set().union(*forms)
        if len(forms) > 1 and all(form.get(key) == index for index, form in enumerate(forms))
    }  # fmt: skip
    known: dict[tuple[Any, ...], int] = {}
    seen = [tuple(item for item in form.items() if item[0] not in places) for form in forms]
    return [known.setdefault(form, len(known)) for form in seen]


def _form(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, module in layer.named_modules():
        yield (name, ""), type(module)
        for own, value in vars(module).items():
            if isinstance(value, str | bool | float | int) and not own.startswith("_"):
                yield (name, own), value
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield (name, own), (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def blocks_of(model: nn.Module, split: Split | None) -> tuple[tuple[Block, ...], dict[int, str]]:
    """Return the blocks, first and last the modules around layers, and each kind's first layer."""
    first, *layers, last = sections_of(model, split)
    if any(len(layer) > 1 for layer in layers):
        raise InvalidArgumentError(
            f"a plan needs layers that are one module each, and a layer of {type(model).__name__} "
            f"is {' and '.join(layers[0])}: put them into one module, or try layouts with "
            "`python -m scaletorch.verify`"
        )
    names = [name for (name,) in layers]
    kinds = kinds_of([model.get_submodule(name) for name in names])
    behind = max(kinds, default=-1) + 2
    line = [Block("+".join(first), 0, "first")]
    line += [Block(name, kind + 1, "layer") for name, kind in zip(names, kinds, strict=True)]
    chosen = {kind + 1: names[kinds.index(kind)] for kind in dict.fromkeys(kinds)}
    return (*line, Block("+".join(last), behind, "last")), chosen


def thin_out(model: nn.Module, blocks: Sequence[Block], chosen: Mapping[int, str]) -> list[Any]:
    """Replace, in place, all layers but the chosen ones; return the list for the latest output."""
    latest: list[Any] = [None]
    for block in blocks:
        if block.place == "layer" and chosen[block.kind] != block.name:
            parent, _, own = block.name.rpartition(".")
            skipped = _Skipped(model.get_submodule(block.name), latest)
            setattr(model.get_submodule(parent), own, skipped)
    return latest


def fill(model: nn.Module, make: Any) -> None:
    """Allocate every parameter of the meta device, in place; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    fresh = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
                    made[id(parameter)] = fresh
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Tensor) and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")


def parameters_of(
    model: nn.Module, blocks: Sequence[Block]
) -> Iterator[tuple[int, str, str, nn.Parameter]]:
    """Yield the parameters of blocks: kind, name in all layers of the kind, full name, tensor."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for block in blocks:
            if any(f"{name}.".startswith(f"{own}.") for own in block.name.split("+")):
                inner = name.removeprefix(f"{block.name}.") if block.place == "layer" else name
                yield block.kind, inner, name, parameter
                break

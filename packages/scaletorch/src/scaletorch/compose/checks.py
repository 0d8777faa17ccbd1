"""Check how ranks begin, and what a first step changes; let batch norms see all ranks' rows.

Numbers and strings in plain attributes are not compared: the rehearsal shows if they change the
results. Attributes that count forwards may matter only in later steps, so they cause a warning.
"""

from __future__ import annotations

import builtins
import itertools
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from ..dist import all_gather_object, functional
from ..dist.building import agree, caught
from ..dist.errors import InvalidArgumentError, ScaletorchError
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import digest, digest_text, divided_modules, eagerly
from ..parallel.pipeline_parallel import StageError
from ..parallel.tensor_parallel import TensorParallelLayer
from .batches import Batch, MicroBatch
from .digests import ABSENT, Key, as_numbers, differing_sides, refuse, text_hash, value_text
from .entries import OF_LOSS
from .experts import expert_names
from .forward import Terms, pipeline_of, wait_for_parameters
from .naming import names_sizes

_SUBJECT = (
    "the values of the plain model that parallelize shards (build it from one seed, or load one "
    "checkpoint into it, on all ranks)"
)
_ONE_BATCH = "Let every rank read the same batch, and give random choices the same seed."


def require_one_model(
    model: nn.Module,
    arguments: Mapping[str, Any],
    manager: ProcessGroupManager,
    *,
    init_sync: str,
    error: Exception | None,
) -> None:
    """Compare the arguments of `parallelize`, and the plain model over tp and pp, before sharding.

    Over cp and dp `DataParallelBucket` compares it later. An `error` of any rank is raised on all.
    """
    lines = [f"{name}={value}" for name, value in arguments.items()]
    agree("the arguments given to parallelize", lines, manager.world_group, error=error)
    if manager.tp_size * manager.pp_size == 1 or init_sync == "none":
        return
    # A model may be built from sharded layers, whose weights already differ between tp ranks.
    tp = caught(agree, _SUBJECT, _values(model, _sharded(model)), manager.tp_group)
    pp = caught(agree, _SUBJECT, _values(model, set()), manager.pp_group)
    agree(_SUBJECT, [], manager.world_group, error=tp or pp)


def _sharded(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose tensors are shards of a tp rank."""
    layers = {m for m in model.modules() if isinstance(m, TensorParallelLayer)}
    return layers | {*divided_modules(model)}


def _values(model: nn.Module, without: Container[nn.Module]) -> list[str]:
    """Return a line for each parameter and buffer, except those of the modules in `without`."""
    sharded = {
        id(x)
        for module in model.modules()
        if module in without
        for x in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    named = (*model.named_parameters(), *model.named_buffers())
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    return [
        f"{name} {tuple(x.shape)} {x.dtype}{' frozen' * (id(x) in frozen)} has values "
        f"{digest_text(x)}"
        for name, x in named
        if id(x) not in sharded
    ]


def require_one_batch(micro_batches: Sequence[Batch], manager: ProcessGroupManager) -> None:
    """Compare the first batch over the ranks that must hold the same one.

    That holds for the global batch (of one dp coordinate if each dp rank reads its own rows), and
    for micro-batches on ranks that differ in tp and pp alone, except for `loss_...` entries.
    """
    cuts = {id(b.cut.whole): b.cut for b in micro_batches if isinstance(b, MicroBatch)}
    own = any(cut.own for cut in cuts.values())
    read = f"the rows of dp{manager.dp_rank}" if own else "the global batch"
    place = f"dp{manager.dp_rank} cp{manager.cp_rank}"
    called: Sequence[Batch] = micro_batches
    if cuts:
        called = [{n: x for n, x in b.items() if not n.startswith(OF_LOSS)} for b in micro_batches]
    looks = [
        *_digests(read, [cut.whole for cut in cuts.values()]),
        *_digests(place, called),
    ]
    whole = read if cuts else place  # its entries must be equal on all ranks
    names = [key.name for key, _ in looks if key.kind == whole]
    looks.append((Key(whole, "list of entries"), text_hash(str(names))))
    parted = differing_sides(looks, manager)
    if parted:
        what = "ranks have different first batches where they need the same one"
        refuse(parted, {}, manager, what, _ONE_BATCH)


def _digests(where: str, batches: Sequence[Batch]) -> list[tuple[Key, int]]:
    """Return a digest of each entry over all batches."""
    names = sorted({name for batch in batches for name in batch})
    return [
        (Key(where, name), text_hash(str([value_text(b[name]) for b in batches if name in b])))
        for name in names
    ]


# Errors that code raises for an unexpected shape, type or attribute.
_OF_CODE = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
_NOT_OF_CODE = (ScaletorchError, torch.OutOfMemoryError, NotImplementedError, RecursionError)
_COMMUNICATION = ("torch.distributed", ".dist.")  # substrings of Python module names
_WAYS_OUT = {
    "dp": "dp and micro-batches leave each forward some of the batch's rows: take the number of "
    "rows from the input",
    "tp": "tp leaves each rank its share of the heads and features: write -1 for the size, let the "
    "plan divide the attribute (Divide('num_heads')), gather what is needed together "
    "('column_gather'), or leave the module out of the plan",
    "cp": "cp leaves each rank its shard of every sequence, which does not fit what the module "
    "makes of the whole length (a mask, positions, blocks): use cp_size=1",
    "ep": "each rank has some of the experts: name them in a plan, let them keep their number in "
    "an attribute such as num_experts, or use ep_size=1",
}


@contextmanager
def explain_failures(
    model: nn.Module, manager: ProcessGroupManager, num_micro_batches: int
) -> Iterator[None]:
    """Replace an error of the model's own code by one that names the module and likely reasons."""
    sizes = {axis: getattr(manager, f"{axis}_size") for axis in _WAYS_OUT}
    sizes["dp"] *= num_micro_batches
    try:
        yield
    except _OF_CODE as error:
        # Fewer rows lead to a misfit of sizes; any other error has nothing to do with dp.
        of_sizes = names_sizes(error)
        axes = [axis for axis in _WAYS_OUT if sizes[axis] > 1 and (axis != "dp" or of_sizes)]
        ways = f"if it runs in one process, then {'; or '.join(_WAYS_OUT[axis] for axis in axes)}"
        if isinstance(error, StageError):
            kind = getattr(builtins, error.kind, None)
            if not axes or not isinstance(kind, type) or not issubclass(kind, _OF_CODE):
                raise
            raise StageError(f"{error}; {ways}", error.kind) from error
        found = _innermost(pipeline_of(model).module, error.__traceback__)
        if isinstance(error, _NOT_OF_CODE) or not axes or found is None:
            raise
        line = (str(error).strip() or "no message").splitlines()[0]
        raise InvalidArgumentError(
            f"{describe_rank()}: {found} failed in its first step on this layout with "
            f"{type(error).__name__} {line!r}; {ways}"
        ) from error


def _innermost(model: nn.Module, trace: TracebackType | None) -> str | None:
    """Return a name for the innermost module that a traceback enters; None in communication."""
    names = {module: name for name, module in model.named_modules()}
    found: str | None = None
    last = ""
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        if isinstance(own, nn.Module) and own in names:
            kind = type(own).__name__
            found = f"module '{names[own]}' ({kind})" if names[own] else f"{kind}.forward"
        last = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return None if any(name in last for name in _COMMUNICATION) else found


_BUFFER = (
    "In one process it would follow the whole batch. Update such a buffer after the step, from the "
    "values of all ranks, or leave the module in eval mode"
)
_PARAMETER = (
    "Change it after optimizer.step(), in the same way on all ranks, or let forward compute "
    "another tensor from it (weight.clamp(...), torch.nn.utils.parametrize)"
)
_AGAIN = "micro-batches, stages or recomputation run it several times for one batch"
# Axes whose ranks should hold the same values -> the difference between these ranks.
_ALIKE = {
    ("dp", "cp"): "other rows or positions",
    ("tp",): "other shards of features or tokens",
    ("pp",): "other stages, which share it,",
}
Looks = dict[str, int]  # digests of values, by name


def _looks(named: Iterable[tuple[str, Tensor]]) -> Looks:
    """Return the digests of tensors, except meta tensors, tensor subclasses and sparse ones."""
    plain = {
        name: x.detach()
        for name, x in named
        if not x.is_meta and type(x.detach()) is Tensor and x.layout is torch.strided
    }
    return dict(zip(plain, as_numbers(map(digest, plain.values())), strict=True))


@contextmanager
def refuse_changes(model: nn.Module, manager: ProcessGroupManager) -> Iterator[None]:
    """Refuse a step's forward if it changes parameters, or buffers differently from one process."""
    wait_for_parameters(model)  # a sharded optimizer may still be fetching them
    before, run = _looks(model.named_parameters()), model.forward
    buffers, numbers = [_looks(model.named_buffers())], [_whole_numbers(model)]

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        buffers.append(_looks(model.named_buffers()))
        numbers.append(_whole_numbers(model))
        return output

    # Not a hook: the wrapper would register it on the wrapped module.
    model.forward = noted
    try:
        with eagerly():
            yield
    finally:
        del model.forward
    one = manager.dp_rank == manager.cp_rank == manager.tp_rank == 0
    if one and (counters := _counters(numbers)):
        warnings.warn(
            f"the forward counts in attribute {counters[0]}, and {_AGAIN}: count steps in the "
            "training loop",
            RuntimeWarning,
            stacklevel=4,
        )
    looks, again = _changed([*buffers, _looks(model.named_buffers())])
    unlike = _differing_buffers(looks, model, manager)
    after = _looks(model.named_parameters())
    wrong = [f"parameter {n}. {_PARAMETER}" for n, x in after.items() if before.get(n) != x]
    wrong += [
        f"buffer {name} from its inputs, and ranks with {whose} now hold other values of it. "
        f"{_BUFFER}"
        for name, whose in unlike.items()
    ]
    wrong += [f"buffer {name} in each run, and {_AGAIN}. {_BUFFER}" for name in again]
    said = f"{describe_rank()}: the forward changes {wrong[0]}" if wrong else ""
    error = InvalidArgumentError(said) if wrong else None
    agree("what the first step has changed", [], manager.world_group, error=error)


def _whole_numbers(model: nn.Module) -> Looks:
    """Return the integer attributes of modules, by full name."""
    return {
        f"{name}.{own}".lstrip("."): value
        for name, module in model.named_modules()
        for own, value in vars(module).items()
        if type(value) is int
    }


def _counters(numbers: Sequence[Looks]) -> list[str]:
    """Return the attributes that every one of several forwards changed by the same number."""
    found, pairs = numbers[0], [*itertools.pairwise(numbers)]
    steps = [{n: b[n] - a[n] for n in found if n in a and n in b} for a, b in pairs]
    moves = [name for name in found if len(steps) > 1 and steps[0].get(name)]
    return [name for name in moves if {each.get(name) for each in steps} == {steps[0][name]}]


def _changed(looks: Sequence[Looks]) -> tuple[Looks, list[str]]:
    """Return the last digests of changed buffers, and the names of those that changed again."""
    before, last, first = looks[0], looks[-1], Looks()
    for each in looks[1:]:
        first = {name: x for name, x in each.items() if before.get(name) != x} | first
    changed = {name: last[name] for name in first if name in last}
    return changed, [name for name, look in changed.items() if first[name] != look]


def _differing_buffers(
    looks: Looks, model: nn.Module, manager: ProcessGroupManager
) -> dict[str, str]:
    """Return the buffers that differ between ranks that should agree, and these ranks as text."""
    experts, sharded = expert_names(model), _sharded(model)
    shards = {f"{n}.{own}" for n, m in model.named_modules() if m in sharded for own in m._buffers}
    own = manager.grid.coordinates(manager.global_rank)
    changed = all_gather_object([*looks], manager.world_group)
    names = dict.fromkeys(name for theirs in changed for name in theirs)
    digests: list[tuple[Key, Tensor | int]] = []
    for axes, whose in _ALIKE.items():
        place = tuple(own._replace(**dict.fromkeys(axes, 0)))
        left_out = experts | shards if axes == ("tp",) else experts
        held = looks if axes == ("pp",) else names  # other stages may not have the buffer
        digests += [(Key(whose, n, place), looks.get(n, ABSENT)) for n in held if n not in left_out]
    found: dict[str, str] = {}
    for key in differing_sides(digests, manager):
        found.setdefault(key.name, key.kind)
    return found


_GROUP = "_scaletorch_rows"  # attribute of a norm: the group whose rows its statistics cover
_KNOWN = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def synchronise_batch_norms(model: nn.Module, manager: ProcessGroupManager) -> None:
    """Let batch norms of torch take statistics over the rows of all dp ranks, in place."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms if manager.dp_size > 1 else ():
        if type(norm).forward in _KNOWN and "forward" not in vars(norm):
            vars(norm)[_GROUP] = manager.dp_group
            vars(norm)["forward"] = MethodType(_forward, norm)


def require_whole_batches(
    model: nn.Module, num_micro_batches: int, manager: ProcessGroupManager, terms: Terms
) -> None:
    """Refuse batch norms whose statistics would not cover the whole batch, except in eval mode."""
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and _of_batch(m)]
    alone = [(name, norm) for name, norm in norms if _GROUP not in vars(norm)]
    own = manager.dp_size > 1 and alone
    refused = {
        "recompute=True would count them twice": terms.recomputes,
        "sequence_parallel=True divides its tokens": terms.shares_sequences,
        f"{num_micro_batches} micro-batches would each have their own": num_micro_batches > 1,
        f"cp_size={manager.cp_size} divides its positions": manager.cp_size > 1,
        f"dp_size={manager.dp_size} divides its rows, which parallelize joins only for norms of "
        "torch.nn without a forward of their own": own,
    }
    why = next((words for words, wrong in refused.items() if wrong), None)
    if norms and why:
        name, norm = (alone or norms)[0]
        raise InvalidArgumentError(
            f"module {name} ({type(norm).__name__}) takes statistics of a whole batch, and {why}: "
            "do without that, use another norm (LayerNorm, GroupNorm), or put it into eval mode"
        )


def _of_batch(norm: _BatchNorm) -> bool:
    return norm.training or norm.running_mean is None


def _forward(self: Any, x: Tensor) -> Tensor:
    """Normalise as `torch.nn.functional.batch_norm` would on the rows of all ranks."""
    self._check_input_dim(x)
    if not _of_batch(self):
        own: Tensor = type(self).forward(self, x)
        return own
    group: ProcessGroup | None = vars(self)[_GROUP]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, variance, count = _statistics(wide, group)
    if self.training and self.running_mean is not None:  # with the unbiased variance, as in torch
        batches = self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(batches) if self.momentum is None else self.momentum
        unbiased = variance.detach() * count / (count - 1)
        self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
    y: Tensor = (wide - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
    if self.weight is not None:
        y = y * self.weight.to(y.dtype).view(shape) + self.bias.to(y.dtype).view(shape)
    return y.to(x.dtype)


def _statistics(x: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, variance and element count of each channel over all ranks' rows."""
    dims = [dim for dim in range(x.ndim) if dim != 1]
    count = x.new_tensor([x.numel() / x.shape[1]])
    sums = functional.all_reduce(torch.cat((x.sum(dims), count)), group)
    count = sums[-1:].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(1, -1, *[1] * (x.ndim - 2))
    variance = functional.all_reduce(centred.square().sum(dims), group) / count
    return mean, variance, count

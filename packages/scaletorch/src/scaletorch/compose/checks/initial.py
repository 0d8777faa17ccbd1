"""Check that ranks begin with the same model and batch; explain errors of the first step."""

from __future__ import annotations

import builtins
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...dist.building import agree, caught
from ...dist.errors import InvalidArgumentError, ScaletorchError
from ...parallel.pg_manager import ProcessGroupManager, describe_rank
from ...parallel.pg_manager.building import digest_text, divided_modules
from ...parallel.pipeline_parallel import StageError
from ...parallel.tensor_parallel import TensorParallelLayer
from ..batches import Batch, MicroBatch
from ..digests import Key, differing_sides, refuse, text_hash, value_text
from ..entries import OF_LOSS
from ..forward import pipeline_of
from ..naming import names_sizes

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
    sharded = divided_modules(model)
    sharded |= {m for m in model.modules() if isinstance(m, TensorParallelLayer)}
    tp = caught(agree, _SUBJECT, _values(model, sharded), manager.tp_group)
    pp = caught(agree, _SUBJECT, _values(model, set()), manager.pp_group)
    agree(_SUBJECT, [], manager.world_group, error=tp or pp)


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
    looks = [*_looks(read, [cut.whole for cut in cuts.values()]), *_looks(place, called)]
    whole = read if cuts else place  # its entries must be equal on all ranks
    names = [key.name for key, _ in looks if key.kind == whole]
    looks.append((Key(whole, "list of entries"), text_hash(str(names))))
    parted = differing_sides(looks, manager)
    if parted:
        what = "ranks have different first batches where they need the same one"
        refuse(parted, {}, manager, what, _ONE_BATCH)


def _looks(where: str, batches: Sequence[Batch]) -> list[tuple[Key, int]]:
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
    "dp": "dp and micro-batches leave each forward some of the batch's rows, and a number of rows "
    "that the module has fixed does not fit that: take it of the input",
    "tp": "tp leaves each rank its share of the heads and features, and a size that the module "
    "takes from its config, an attribute or its whole input does not fit that: write -1 for the "
    "size, or let the plan divide the attribute (Divide('num_heads')), gather what is needed "
    "together ('column_gather'), split what is not ('row_split', PerHead('name')), or leave the "
    "module out; or use tp_size=1",
    "cp": "cp leaves each rank its shard of every sequence, and what the module makes of the whole "
    "length (a mask, positions, blocks) does not fit that: use cp_size=1",
    "ep": "each rank has some of the experts, and the module wants all of them: use ep_size=1, "
    "name the experts in a plan, or let them keep their number in an attribute such as num_experts",
}


@contextmanager
def explain_failures(
    model: nn.Module, manager: ProcessGroupManager, num_micro_batches: int
) -> Iterator[None]:
    """Replace an error of the model's own code by one that names the module and likely reasons."""
    sizes = {axis: getattr(manager, f"{axis}_size") for axis in _WAYS_OUT}
    sizes["dp"] *= num_micro_batches

    def ways_out(error: Exception) -> list[str]:
        # Fewer rows lead to a misfit of sizes; any other error has nothing to do with dp.
        of_sizes = names_sizes(error)
        axes = [axis for axis in _WAYS_OUT if sizes[axis] > 1 and (axis != "dp" or of_sizes)]
        return [_WAYS_OUT[axis] for axis in axes]

    try:
        yield
    except StageError as error:
        ways = ways_out(error)
        kind = getattr(builtins, error.kind, None)
        if not ways or not isinstance(kind, type) or not issubclass(kind, _OF_CODE):
            raise
        why = f"{error}; if it runs in one process, then {'; or '.join(ways)}"
        raise StageError(why, error.kind) from error
    except _OF_CODE as error:
        ways = ways_out(error)
        found = _innermost(pipeline_of(model).module, error.__traceback__)
        if isinstance(error, _NOT_OF_CODE) or not ways or found is None:
            raise
        line = (str(error).strip() or "no message").splitlines()[0]
        raise InvalidArgumentError(
            f"{describe_rank()}: {found} failed in its first step on this layout with "
            f"{type(error).__name__} {line!r}; if it runs in one process, then "
            f"{'; or '.join(ways)}"
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

"""Explain errors of a model's own code in its first step: the module and the likely reason."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from ...dist.errors import InvalidArgumentError, ScaletorchError
from ...parallel.pg_manager import ProcessGroupManager, describe_rank
from ...parallel.pipeline_parallel import StageError
from ..forward import pipeline_of

# Errors that code raises for an unexpected shape, type or attribute.
_OF_CODE = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
_NOT_OF_CODE = (ScaletorchError, torch.OutOfMemoryError, NotImplementedError, RecursionError)
_COMMUNICATION = ("torch.distributed", ".dist.")  # substrings of Python module names
_WAYS_OUT = {
    "dp": (
        "dp and micro-batches leave each forward some of the batch's rows, and a number of rows "
        "that the module has fixed does not fit that: take it of the input"
    ),
    "tp": (
        "tp leaves each rank its share of the heads and features, and a size that the module takes "
        "from its config, an attribute or its whole input, or something that it makes for all "
        "heads, does not fit that: write -1 for the size, or let the plan divide the attribute "
        "(Divide('num_heads')), style what makes features that are needed together "
        "'column_gather', what takes them 'row_split' and parameters of each head PerHead('name'), "
        "or leave the module out; or use tp_size=1"
    ),
    "cp": (
        "cp leaves each rank its part of every sequence, and what the module makes of the whole "
        "length (a mask, positions, blocks) does not fit that: use cp_size=1"
    ),
    "ep": (
        "each rank has some of the experts, and the module wants all of them: use ep_size=1, name "
        "the experts in a plan, or let them keep their number in an attribute such as num_experts, "
        "which is set to this rank's"
    ),
}


@contextmanager
def failures_named(
    model: nn.Module, manager: ProcessGroupManager, num_micro_batches: int
) -> Iterator[None]:
    """Replace an error of the model's own code by one that names the module and the likely reason.

    pp gives no reason: it changes nothing within a layer.
    """
    sizes = {axis: getattr(manager, f"{axis}_size") for axis in _WAYS_OUT}
    sizes["dp"] *= num_micro_batches

    def ways_out(error: Exception) -> list[str]:
        # Fewer rows lead to a misfit of sizes; any other error has nothing to do with dp.
        of_sizes = re.search(r"\b(sizes?|shapes?|dimensions?)\b", str(error)) is not None
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
    """Return a name for the innermost module of a model that a traceback enters.

    None if there is none, or if it ends in communication: then another rank may have failed.
    """
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
    return None if any(part in last for part in _COMMUNICATION) else found

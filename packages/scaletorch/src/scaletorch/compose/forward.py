"""State of a parallelized model: the arguments of its forward, its grid, and the checks done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..dist.errors import InvalidArgumentError, StateError
from ..parallel.context_parallel.building import is_pretrained
from ..parallel.pg_manager import ProcessGroupManager, get_process_group_manager
from ..parallel.pipeline_parallel import PipelineParallel
from .plain import Plain, base_of

Counting = Callable[[Tensor], Tensor]  # ids [B, L] -> positions [B, L]

_PASSING = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@dataclass(slots=True)
class Terms:
    """Facts about a model that a training step needs."""

    name: str  # class of the plain model
    arguments: Mapping[str, bool]  # of its forward; True for those without a default
    takes_any: bool  # its forward takes keyword arguments of any name
    has_batch_norms: bool = False
    is_pretrained: bool = False  # it is a model of transformers
    cp_layout: str | None = None  # the order of positions over cp ranks; None for one rank
    manager: ProcessGroupManager | None = None  # None if `parallelize` did not make the model
    shares_sequences: bool = False  # each tp rank holds a shard of every sequence in the layers
    needs_positions: bool = False  # since some stage sees only shards of tokens
    # Computes positions, before they are cut, from whole rows of ids; None if they are 0, 1, 2, ...
    counting: Counting | None = None
    recomputes: bool = False  # layers run again in backward
    keeps_cache: bool = False  # the config enables a cache, and forward takes `use_cache`
    real_positions: Tensor | None = None  # mask of this rank's; None if none is padding
    counts_routing: bool = False  # `count_routing` counts tokens
    looked: bool = False  # the ranks have compared their first batch
    several: bool = False  # some rank has several micro-batches in the step
    counted: float | None = None  # last count of a loss_fn per token, or per row without tokens
    correction: float = 1.0  # of the last step's gradients, once all losses were counted
    seen: int = 0  # checks of first steps done: 1 with one micro-batch, 2 with several
    originals: Mapping[str, ref[Tensor]] = field(default_factory=dict)  # the plain parameters
    plain: Plain | None = None  # None if the model is not rehearsed
    rehearses: bool = False  # whether to rehearse the next step
    rehearsed: set[object] = field(default_factory=set)  # kinds of steps; see `train_step`
    keeps_state: bool = False  # forwards change attributes of modules

    def __deepcopy__(self, memo: dict[int, Any]) -> Terms:
        """Return the terms for a copy of the model, on the same grid."""
        return replace(self, rehearsed={*self.rehearsed})

    def takes(self, argument: str) -> bool:
        """Return whether the forward accepts this argument by keyword."""
        return self.takes_any or argument in self.arguments


_TERMS = "_scaletorch_terms"
_rehearses = False  # of the process: autograd's own threads see no context variables


def rehearses() -> bool:
    """Return whether a rehearsal is running, whose steps must leave no trace."""
    return _rehearses


@contextmanager
def rehearsing() -> Iterator[None]:
    """Mark that a rehearsal is running."""
    global _rehearses
    before, _rehearses = _rehearses, True
    try:
        yield
    finally:
        _rehearses = before


def read_terms(model: nn.Module) -> Terms:
    """Read the terms of a plain module from its forward, its config and its modules."""
    model = base_of(model)
    parameters = _signature(model)
    arguments = {
        name: parameter.default is parameter.empty
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    has_batch_norms = any(isinstance(module, _BatchNorm) for module in model.modules())
    terms = Terms(type(model).__name__, arguments, takes_any, has_batch_norms, is_pretrained(model))
    asked = getattr(getattr(model, "config", None), "use_cache", False)
    terms.originals = {name: ref(p) for name, p in model.named_parameters()}
    terms.keeps_cache = bool(asked) and "use_cache" in arguments
    return terms


def keep_terms(model: nn.Module, terms: Terms) -> None:
    """Store the terms of a parallelized model on it."""
    vars(model)[_TERMS] = terms  # in its dict, so that a copy of the model has them too


def terms_of(model: nn.Module) -> Terms:
    """Return the terms of a parallelized model; read them if `parallelize` did not make it."""
    if _TERMS not in vars(model):
        plain: Any = model
        while isinstance(getattr(plain, "module", None), nn.Module):
            plain = plain.module
        keep_terms(model, read_terms(plain))
    terms: Terms = vars(model)[_TERMS]
    return terms


def pipeline_of(model: Any) -> PipelineParallel:
    """Return the pipeline inside a model's wrappers."""
    while not isinstance(model, PipelineParallel):
        model = model.module
    return model


def wait_for_parameters(model: nn.Module) -> None:
    """Wait for the parameters that a sharded optimizer is still fetching in the background."""
    parallel: Any = model
    if getattr(model, "optimizer_shards", None) is not None:
        parallel.wait_for_parameters()


def manager_of(model: nn.Module, manager: ProcessGroupManager | None) -> ProcessGroupManager:
    """Return the grid of a call: the given one, or the model's, or the current one."""
    require_manager(manager)
    require_own_names(model)
    if manager is None and isinstance(model, nn.Module):
        manager = terms_of(model).manager or get_process_group_manager()
    elif manager is None:
        raise InvalidArgumentError(
            f"model must be what parallelize returned, got {type(model).__name__}"
        )
    if manager is None:
        raise StateError(
            f"{type(model).__name__} was not parallelized, and there is no process group manager: "
            "pass manager=..., or call setup_process_group_manager(...) first"
        )
    return manager


def require_own_names(model: object) -> None:
    """Refuse the wrapper that `torch.compile(model)` returns: its names and hooks differ."""
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        raise InvalidArgumentError(
            "torch.compile(model) returns a module around the model, and gives parameters other "
            "names: compile in place, by model.compile() or layer.compile()"
        )


def require_manager(manager: object, *, needed: bool = False) -> None:
    """Require a manager; None is allowed unless `needed`."""
    if not isinstance(manager, ProcessGroupManager) and (needed or manager is not None):
        raise InvalidArgumentError(
            "manager must be a ProcessGroupManager, as setup_process_group_manager returns it; "
            f"it is a {type(manager).__name__}"
        )


def _signature(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of forward, or of the base class's if it takes *args and **kwargs."""
    own = [vars(model)["forward"]] if "forward" in vars(model) else []
    bases = [base for base in type(model).__mro__ if "forward" in vars(base)]
    forwards = [*own, *(MethodType(vars(base)["forward"], model) for base in bases)]
    parameters: Mapping[str, inspect.Parameter] = {}
    for forward in forwards:
        parameters = inspect.signature(forward).parameters
        if not {parameter.kind for parameter in parameters.values()} >= _PASSING:
            break
    return parameters

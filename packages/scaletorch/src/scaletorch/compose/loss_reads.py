"""Check a loss_fn's reads: the model's parameters, other parameters, and sharded logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from ..dist.building import tensors_in
from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from .digests import some
from .forward import terms_of

_PICKS: Mapping[Callable[..., Any], tuple[int, str]] = {  # position and name of the word indices
    F.cross_entropy: (1, "target"),
    F.nll_loss: (1, "target"),
    torch.gather: (2, "index"),
    Tensor.gather: (2, "index"),
}
_GATHERED = (
    "the layer that makes them is cut by columns and gathers nothing: name it 'column_gather' in "
    "the plan; in place of F.linear(x, embedding.weight) take an nn.Linear with that weight"
)
_PARALLEL = (
    "loss_parallel=True keeps them so: take token_losses, token_log_probs, log_probs and "
    "vocabulary_sums of scaletorch.compose in loss_fn, or do without loss_parallel"
)


class Words(TorchFunctionMode):
    """A function mode that refuses, in first steps, a loss that picks a word beyond the logits."""

    def __init__(self, manager: ProcessGroupManager, *, sharded: bool) -> None:
        super().__init__()
        self._size, self._way = manager.tp_size, _PARALLEL if sharded else _GATHERED

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, unless it would pick a word outside of the logits."""
        kwargs = kwargs or {}
        if func in _PICKS:
            place, name = _PICKS[func]
            logits = args[0] if args else kwargs.get("input")
            words = args[place] if len(args) > place else kwargs.get(name)
            dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
            if isinstance(logits, Tensor) and isinstance(words, Tensor) and logits.ndim:
                self._require(logits, words, int(logits.ndim > 1) if name == "target" else dim)
        return func(*args, **kwargs)

    def _require(self, logits: Tensor, words: Tensor, dim: int) -> None:
        if words.is_floating_point() or not words.numel():  # probabilities of all words, or no word
            return
        size, highest = logits.shape[dim], int(words.max())
        if highest >= size:
            raise InvalidArgumentError(
                f"{describe_rank()}: the loss picks word {highest} of logits "
                f"{list(logits.shape)}, which have {size} words on this rank. Where tp_size="
                f"{self._size} leaves each rank its shard of the vocabulary, {self._way}"
            )


def number_of_next_node() -> int:
    """Return the sequence number of autograd's next node on this thread."""
    with torch.enable_grad():
        node: Any = torch.empty(0, requires_grad=True).view(-1).grad_fn
    return int(node._sequence_nr()) + 1


class Reads(NamedTuple):
    """Tensors that a loss reads, as its autograd graph shows."""

    beside: list[nn.Parameter]  # trained parameters outside the model, such as a temperature
    hidden: bool  # tensors that the forward made but did not return, such as an auxiliary loss
    # Leaves in a penalty: a term that depends on no output of the model, and is one number before
    # it is added to others. A weight that is multiplied with an output (a head in the loss) does
    # not count, nor does a leaf of one element.
    penalized: list[Tensor]


def read_loss(loss: Tensor, outputs: Iterable[Node | None], first: int, model: nn.Module) -> Reads:
    """Return the tensors that a loss reads besides outputs; the model made nodes before `first`."""
    ends = set(outputs)
    under: dict[Node, _Under] = {}
    parameters, penalized, hidden = list[nn.Parameter](), list[Tensor](), False
    waiting = [] if loss.grad_fn is None else [(loss.grad_fn, False)]
    while waiting:
        node, entered = waiting.pop()
        if node in under:
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            under[node] = _Under(False, [variable] if variable.numel() > 1 else [])
            parameters += [variable] if isinstance(variable, nn.Parameter) else []
        elif node in ends or node._sequence_nr() < first:
            under[node] = _Under(True, [])
            hidden |= node not in ends
        elif not entered:
            waiting += [(node, True), *((n, False) for n, _ in node.next_functions if n)]
        else:
            inputs = [under[n] for n, _ in node.next_functions if n]
            leaves = [leaf for each in inputs for leaf in each.leaves]
            computes = any(each.computes for each in inputs)
            if (not computes and _is_number(node)) or node.name().startswith("CompiledFunction"):
                penalized, leaves = penalized + leaves, []
            under[node] = _Under(computes, leaves)
    own = {id(p) for p in model.parameters()} if parameters else set()
    return Reads([p for p in parameters if id(p) not in own], hidden, penalized)


@contextmanager
def keep_gradients(loss_fn: Any, model: nn.Module) -> Iterator[Any]:
    """Yield a loss_fn; at the end restore the gradients of its parameters outside the model."""
    before: dict[int, tuple[nn.Parameter, Tensor | None]] = {}

    def noted(output: Any, batch: Any) -> Any:
        first, ends = number_of_next_node(), [x.grad_fn for x in tensors_in(output)]
        found = loss_fn(output, batch)
        for total in tensors_in(found):
            for p in read_loss(total, ends, first, model).beside:
                before.setdefault(id(p), (p, None if p.grad is None else p.grad.clone()))
        return found

    try:
        yield noted if callable(loss_fn) else loss_fn
    finally:
        for parameter, gradient in before.values():
            parameter.grad = gradient


class _Under(NamedTuple):
    """A node's leaves that are in no penalty yet, and whether it depends on a model's output."""

    computes: bool
    leaves: list[Tensor]


def _is_number(node: Node) -> bool:
    """Return whether all results of a node have one element."""
    return all(math.prod(each.shape) == 1 for each in node._input_metadata if each is not None)


def require_no_parameters(
    leaves: Sequence[Tensor], model: nn.Module, manager: ProcessGroupManager
) -> None:
    """Refuse a penalty on the model's parameters: a rank may hold only some of them, or shards."""
    if not leaves:
        return
    found = {id(leaf) for leaf in leaves}
    before = ((name, each()) for name, each in terms_of(model).originals.items())
    read = [name for name, p in (*model.named_parameters(), *before) if id(p) in found]
    if not read:
        return
    sizes = {axis: getattr(manager, f"{axis}_size") for axis in ("tp", "pp", "ep")}
    cut = ", ".join(f"{axis}_size={size}" for axis, size in sizes.items() if size > 1)
    raise InvalidArgumentError(
        f"{describe_rank()}: loss_fn reads parameters of the model for a penalty ({some(read)}), "
        f"and with {cut} ranks have different ones. Use the optimizer's weight_decay, or add "
        "the penalty's gradient to each .grad between train_step and optimizer.step()"
    )

"""Call a user's loss for each micro-batch, check its reads and result, compare it over ranks.

An error on one rank is kept until the end of the step, so that no rank waits for another; then all
ranks raise.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from ..dist import all_reduce, get_comm_device
from ..dist.building import agree, caught, tensors_in
from ..dist.errors import InvalidArgumentError, MismatchError, ScaletorchError
from ..parallel.pg_manager import IGNORED, ProcessGroupManager, describe_rank
from .batches import Batch, Called, counts_nothing, size_of, token_count
from .digests import some
from .forward import terms_of
from .loss import LossBatch, find_sharded_head
from .naming import names_sizes

Number = int | float | Tensor
LossFunction = Callable[[Any, Any], tuple[Tensor, Number]]
CountFunction = Callable[[Any], Number]

# Allowed relative gap of sums on tp ranks: in epsilons of the coarsest dtype, and the upper bound.
_ROUNDINGS, MOST = 128, 1e-3
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # finest first
_SHARES = (
    "; with sequence_parallel, values that layers return beside the hidden states are of this "
    "rank's shard of the tokens: sum them over tp by scaletorch.dist.functional.reduce"
)
_HIDDEN = (
    "loss_fn takes tensors of the model that its forward did not return, such as auxiliary losses "
    "kept as attributes, and with pp_size={} those of other stages are missing: let layers pass "
    "them on in a tuple with the hidden states, and let forward return them"
)
_OTHER_POSITIONS = {
    "cp": "cp divides positions of the output and of entries [B, L]: name the dim of positions of "
    "other entries in shard_global_batch(..., sequence_dims={'loss_name': 1})",
    "sequence_parallel": "sequence parallelism divides positions of what layers return: compute "
    "the loss from the logits",
}
NOTHING_COUNTS = "no rank's micro-batches have anything that the loss counts"


class OwnLoss:
    """A loss_fn on this rank.

    `beside` has, by id, the parameters outside the model that the loss trains, each with whether it
    had no gradient before. If it `counts_later`, gradients are divided by an estimate of
    the count, and corrected when all losses have been counted.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        count_fn: CountFunction | None,
        model: nn.Module,
        manager: ProcessGroupManager,
        *,
        trains: bool,
    ) -> None:
        self.function, self._count_fn = loss_fn, count_fn
        self._model, self._head = model, find_sharded_head(model)
        self._manager, self._trains = manager, trains
        self.counts_later = False
        self.beside: dict[int, tuple[nn.Parameter, bool]] = {}
        self._first = not terms_of(model).seen
        self._counts: list[tuple[Number, Number]] = []
        self._coarsest = 0  # index in _DTYPES of the coarsest dtype of outputs and losses
        self._problem: Exception | None = None

    def require_functions(self) -> None:
        """Require that loss_fn and count_fn can be called."""
        for name, function in (("loss_fn", self.function), ("count_fn", self._count_fn)):
            if function is not None and not callable(function):
                raise InvalidArgumentError(
                    f"{name} must be a function, got {type(function).__name__}"
                )

    def count(self, batch: Batch) -> float:
        """Return the number of losses of a micro-batch, from its entries alone."""
        if counts_nothing(batch):
            return 0
        seen = LossBatch(batch, self._head, self._manager)
        return checked_count(token_count(seen) if self._count_fn is None else self._count_fn(seen))

    def call(self, output: Any, batch: Called) -> tuple[Tensor, Number]:
        """Return a micro-batch's sum and count; if the loss fails, zeros, and `settle` raises."""
        try:
            total, count = self._called(output, batch)
            if counts_nothing(batch):
                total, count = _nothing(output).to(total.dtype), 0
        except Exception as error:  # `settle` raises it at the end of the step, on all ranks
            nothing = _nothing(output)
            if self._trains and not nothing.requires_grad:  # backward fails, so the step has no end
                raise
            self._problem = self._problem or error
            return nothing, 0
        self._counts.append((count, batch.count))
        return total, count

    def _called(self, output: Any, batch: Called) -> tuple[Tensor, Number]:
        manager, outputs = self._manager, list(tensors_in(output))
        first, ends = number_of_next_node(), [x.grad_fn for x in outputs]
        seen = LossBatch(batch.micro_batch, self._head, manager)
        words = Words(manager, sharded=self._head is not None)
        with words if self._first and manager.tp_size > 1 else nullcontext():
            try:
                found = self.function(output, seen)
            except (RuntimeError, ValueError, LookupError) as error:
                self._explain(error)
                raise
        total, count = _checked_pair(found, trains=self._trains)
        if self._trains:
            reads = read_loss(total, ends, first, self._model)
            for p in reads.beside:
                self.beside.setdefault(id(p), (p, p.grad is None))
            if reads.hidden and any(ends) and manager.pp_size > 1:
                raise InvalidArgumentError(f"{describe_rank()}: {_HIDDEN.format(manager.pp_size)}")
            if manager.tp_size * manager.pp_size * manager.ep_size > 1:
                require_no_parameters(reads.penalized, self._model, manager)
        dtypes = {x.dtype for x in (found[0], *outputs)}
        self._coarsest = max(self._coarsest, *(i for i, d in enumerate(_DTYPES) if d in dtypes))
        return total, count

    def _explain(self, error: Exception) -> None:
        """Raise an error that explains a mismatch of sizes if positions are divided over ranks."""
        shares, cp = terms_of(self._model).shares_sequences, self._manager.cp_size > 1
        if isinstance(error, ScaletorchError) or not (shares or cp) or not names_sizes(error):
            return
        ways_out = [_OTHER_POSITIONS["cp"]] * cp + [_OTHER_POSITIONS["sequence_parallel"]] * shares
        raise InvalidArgumentError(
            f"{describe_rank()}: loss_fn fails on this rank's positions of each sequence "
            f"({type(error).__name__}: {error}). {'; '.join(ways_out)}"
        ) from error

    def settle(self, total: Tensor | float) -> None:
        """Raise on every rank the errors of this step; compare the sums of losses over tp."""
        note = _written(float(total), self._coarsest)
        world = self._manager.world_group
        notes = agree("the loss of this step", [], world, error=self._found(), note=note)
        shares = terms_of(self._model).shares_sequences
        _require_agreement([_read(each) for each in notes], self._manager, shares_sequences=shares)

    def per_item(self, count: Number, batch: Called) -> float:
        """Return the losses per token (or row) of a first micro-batch, over all cp x dp ranks."""
        group = self._manager.cp_dp_group
        both = torch.tensor([float(count), size_of(batch)], dtype=torch.float32)
        both = both.to(get_comm_device(group))
        all_reduce(both, group=group)
        ratio = float(both[0] / both[1])
        return ratio if 0 < ratio < math.inf else 1.0

    def counted(self) -> float:
        """Return this rank's number of losses, once `settle` has read them from the device."""
        return sum(float(found) for found, _ in self._counts)

    def _found(self) -> Exception | None:
        """Return the error of this step, and drop it: its traceback refers back to this object."""
        problem, self._problem = self._problem, None
        return problem or caught(self._require_counts)

    def _require_counts(self) -> None:
        self._counts = [(checked_count(a), checked_count(b)) for a, b in self._counts]
        compares = self._trains and not self.counts_later
        for found, expected in self._counts:
            if compares and not math.isclose(found, expected, rel_tol=1e-6):
                said = "count_fn" if self._count_fn else f"counting labels other than {IGNORED}"
                raise InvalidArgumentError(
                    f"loss_fn counted {found:g} losses in a micro-batch, and {said} gave "
                    f"{expected:g} before, by which gradients were divided: pass "
                    "train_step(..., count_fn=), a function of the micro-batch that returns the "
                    "count which loss_fn returns; drop this step's gradients"
                )


def checked_count(count: Any) -> float:
    """Return a count as a float; refuse one that is not a finite number of at least 0."""
    one = isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex()
    value = count.item() if one else count
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidArgumentError(
            f"a count of losses must be a finite number of at least 0, got {_shown(value)}"
        )
    return float(value)


def _checked_pair(found: Any, *, trains: bool) -> tuple[Tensor, Number]:
    """Return a loss_fn's sum, in float32 at least, and its count, whose value is read later."""
    pair = tuple(found) if isinstance(found, tuple | list) else (found,)
    total, count = pair if len(pair) == 2 else (None, None)
    if not (
        isinstance(total, Tensor)
        and total.numel() == 1
        and total.is_floating_point()
        and isinstance(count, int | float | Tensor)
        and not (isinstance(count, Tensor) and (count.numel() != 1 or count.is_complex()))
    ):
        raise InvalidArgumentError(
            "loss_fn(output, micro_batch) must return (sum of the losses, one floating-point "
            f"element; their number); it returned {'; '.join(map(_shown, pair))}"
        )
    if trains and not total.requires_grad:
        raise InvalidArgumentError("the sum of loss_fn has no gradient: do not detach it")
    wide = torch.promote_types(total.dtype, torch.float32)
    return total.reshape(()).to(wide), count.detach() if isinstance(count, Tensor) else count


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}, {value.dtype}"
    return repr(value) if isinstance(value, int | float | None) else type(value).__name__


def _nothing(output: Any) -> Tensor:
    """Return a zero whose backward reaches every floating tensor of an output."""
    found = [x.nan_to_num(0, 0, 0).sum() * 0 for x in tensors_in(output) if x.is_floating_point()]
    return torch.stack(found).sum() if found else torch.zeros(())


def _written(value: float, dtype: int) -> int:
    """Return the bits of a float64 as an int, with an index in _DTYPES in the last two bits."""
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return int(bits) & ~3 | dtype


def _read(note: int) -> tuple[float, float]:
    """Return the number in a note of `_written`, and its allowed relative rounding error."""
    (value,) = struct.unpack("d", struct.pack("q", note & ~3))
    return value, min(MOST, _ROUNDINGS * torch.finfo(_DTYPES[note & 3]).eps)


def _require_agreement(
    sums: Sequence[tuple[float, float]], manager: ProcessGroupManager, *, shares_sequences: bool
) -> None:
    """Refuse sums that differ by more than rounding on ranks that differ in tp alone."""
    first: dict[Any, tuple[int, float]] = {}
    why = _SHARES * shares_sequences
    for rank, (value, rounding) in enumerate(sums):
        place = manager.grid.coordinates(rank)._replace(tp=0)
        other, usual = first.setdefault(place, (rank, value))
        size = max(abs(value), abs(usual))
        if abs(value - usual) > rounding * size or math.isnan(value) != math.isnan(usual):
            raise MismatchError(
                f"{describe_rank()}: the loss is {value!r} on rank {rank} and {usual!r} on rank "
                f"{other}, which hold the same positions and differ in tp alone: sum over shards "
                "of the vocabulary (vocabulary_sums), gather the head's logits ('column_gather' "
                f"in the plan), and read no parameters and draw nothing at random in the loss{why}"
            )


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
    # Of each node: whether it depends on an output, and its leaves that are in no penalty yet.
    under: dict[Node, tuple[bool, list[Tensor]]] = {}
    parameters, penalized, hidden = list[nn.Parameter](), list[Tensor](), False
    waiting = [] if loss.grad_fn is None else [(loss.grad_fn, False)]
    while waiting:
        node, entered = waiting.pop()
        if node in under:
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            under[node] = False, [variable] if variable.numel() > 1 else []
            parameters += [variable] if isinstance(variable, nn.Parameter) else []
        elif node in ends or node._sequence_nr() < first:
            under[node] = True, []
            hidden |= node not in ends
        elif not entered:
            waiting += [(node, True), *((n, False) for n, _ in node.next_functions if n)]
        else:
            inputs = [under[n] for n, _ in node.next_functions if n]
            leaves = [leaf for _, theirs in inputs for leaf in theirs]
            computes = any(each for each, _ in inputs)
            is_number = all(math.prod(x.shape) == 1 for x in node._input_metadata if x is not None)
            if (is_number and not computes) or node.name().startswith("CompiledFunction"):
                penalized, leaves = penalized + leaves, []
            under[node] = computes, leaves
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

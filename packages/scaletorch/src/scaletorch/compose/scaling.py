"""Check optimizers, and compare how a loop changes gradients and weights between steps.

An optimizer that needs more than a rank's shards is refused before its first step.

A loop may wrongly clip each rank's gradients by their own norm, or subtract a shard's own mean from
it. Ranks then use different numbers, even if the parameters that they share stay equal. So this
module copies some elements of some tensors before the loop's code runs, and afterwards fits
after = factor * before + offset. Changes that no such fit explains (clipping by value, weight decay
by hand, noise, thresholds, statistics of rows) are not compared, since the values do not show
whether they are right on shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..dist import all_gather_object
from ..dist.errors import InvalidArgumentError, MismatchError
from ..parallel.data_parallel import Shard, parameter_shards
from ..parallel.data_parallel.building import is_sharded
from ..parallel.expert_parallel.building import find_expert_cuts
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import Scope, update_scope
from ..parallel.tensor_parallel.building import find_cuts
from .digests import some
from .forward import terms_of

TENSORS = 8  # tensors that a rank samples in a step; the next step samples others
ELEMENTS = 256  # at most, from each tensor
FEWEST = 16  # a tensor with fewer elements is not sampled
LOOKS = 4  # comparisons over tp; each costs a message, and faults show early or never
# The numbers of `Scaling.facts`: whether all gradients have one factor, its value, square and
# tolerance; whether tp shards changed; whether all rates have one ratio, its value and square.
SCALES = (
    "scaled", "factor", "factor²", "tolerance", "shards changed", "rated", "ratio", "ratio²"
)  # fmt: skip
SAME = 1e-6  # relative tolerance; an eighth of the dtype's epsilon, if that is larger
CLIPPED = (
    "ranks scaled gradients by different factors between train_step and the optimizer's step: {}. "
    "To clip, use scaletorch.compose.clip_grad_norm_(model, max_norm), since torch's takes the "
    "norm of a rank's own shards; to train layers at other rates, set lr in the optimizer's groups"
)
OF_SHARDS = (
    "the {} was changed differently on tp ranks, each of which has a shard of it: {}. A statistic "
    "such as its mean or norm has to be of the whole: sum it over manager.tp_group, or take it of "
    "full_state_dict(model)"
)
STEERED = (
    "the learning rates of optimizers have changed differently on some ranks: {}. They may follow "
    "scaletorch.compose.global_grad_norm(model) or the loss of train_step, but not the norm of a "
    "rank's own gradients"
)
OUTSIDE = (
    "an optimizer has updated a parameter of shape {} that loss_fn uses and the model does not "
    "have, so that its gradient is not summed over ranks: make it a parameter of the model, whose "
    "forward uses it, or returns it with its output"
)
BACK = "; go back to a checkpoint from before"


class Fit(NamedTuple):
    """The change of a tensor: after = factor * before + offset."""

    factor: float  # NaN if it is not known
    offset: float
    size: float  # root mean square of the elements after the change
    known: float  # 1; 0 if the fit does not explain the change; -1 if all elements stay zero


class Scaling:
    """Copies of elements of a model's gradients and weights, and fits of their later values."""

    def __init__(self, manager: ProcessGroupManager) -> None:
        self.manager = manager
        self._divided = manager.tp_size * manager.pp_size * manager.ep_size > 1
        self._shards: list[Shard] = []
        self._cut: Collection[str] = ()  # names of the parameters that tp divides
        self._rounding, self._tolerance, self._count = 0.0, SAME, ELEMENTS
        self._turn, self._looks = 0, LOOKS
        self._gradients: list[tuple[Shard, Tensor]] = []  # with their sampled elements
        self._weights: list[tuple[Shard, Tensor]] = []
        self._fitted: list[tuple[str, list[Shard], Tensor]] = []  # kind, tensors, fits [k, 4]
        self._fits: dict[tuple[str, str], Fit] = {}  # this rank's fits, by kind and name
        # Gradients of parameters outside the model, which no rank sums, and their versions.
        self._beside: dict[int, tuple[ref[Tensor], int]] = {}
        self._strange = ""  # shape of an updated parameter outside the model
        self._rates: WeakKeyDictionary[Optimizer, list[float]] = WeakKeyDictionary()  # first rates
        self._ratios: list[float] = []  # current rate / first rate: minimum and maximum
        self._steered: float | None = None  # the common ratio that this rank has sent

    def sample(self, model: nn.Module, beside: Iterable[nn.Parameter]) -> None:
        """Copy elements of some gradients; note those of `beside`, the loss's own parameters."""
        grads = {id(p): p.grad for p in beside if p.grad is not None}
        self._beside = {each: (ref(grad), grad._version) for each, grad in grads.items()}
        self._gradients, self._fitted, self._fits = [], [], {}
        if not (self._divided or is_sharded(model)):
            return
        if not self._shards or not all(_is_kept(each) for each in self._shards):
            self._look_up(model)
        stride = -(-len(self._shards) // TENSORS) or 1
        shards = self._shards[self._turn % stride :: stride]
        self._gradients = self._kept("gradient", shards)
        self._turn += 1

    def before_update(self, taken: Mapping[int, Tensor]) -> None:
        """Fit the changes of an optimizer's gradients (by id), without waiting for the device."""
        for each in self._beside.keys() & taken.keys():
            (kept, version), grad = self._beside[each], taken[each].grad
            if grad is not None and grad is kept() and grad._version == version:
                self._strange = str(list(grad.shape))
        mine = [pair for pair in self._gradients if id(pair[0].tensor) in taken]
        self._gradients = [pair for pair in self._gradients if id(pair[0].tensor) not in taken]
        self._fit("gradient", [pair for pair in mine if pair[0].tensor.grad is not None])

    def note_rates(self, optimizer: Optimizer) -> None:
        """Record the ratios of an optimizer's learning rates to its first ones other than 0."""
        rates = [group.get("lr") for group in optimizer.param_groups]
        numbers = [x if isinstance(x, int | float) else math.nan for x in rates]
        first = self._rates.setdefault(optimizer, [])
        first += numbers[len(first) :]
        first[:] = [old or new for old, new in zip(first, numbers, strict=False)]
        self._ratios += [new / old for new, old in zip(numbers, first, strict=False) if old]
        self._ratios = [min(self._ratios), max(self._ratios)] if self._ratios else []

    def require_own(self) -> None:
        """Refuse an update of a parameter outside the model by this rank's gradient alone."""
        if self._strange:
            raise InvalidArgumentError(f"{describe_rank()}: {OUTSIDE.format(self._strange)}{BACK}")

    def after_update(self, taken: Collection[int]) -> None:
        """Copy elements of some weights that an optimizer has updated and tp shards."""
        if self.manager.tp_size > 1 and self._looks:
            others = [pair for pair in self._weights if id(pair[0].tensor) not in taken]
            fitted = [each for kind, shards, _ in self._fitted for each in shards]
            mine = [each for each in fitted if id(each.tensor) in taken]
            cut = [s for s in mine if s.name in self._cut and s.tensor is s.parameter]
            self._weights = others + self._kept("weight", cut)

    def facts(self, residue: Tensor | None) -> dict[str, float]:
        """Return this rank's numbers by the names of `SCALES`; `residue` is fetched with them."""
        self._fit("weight", self._weights)
        self._weights = []
        facts = {"residue": self._read(residue)}
        factor, tolerance = self._factor(), self._tolerance
        changed = any(
            fit.known == 1
            and (abs(fit.factor - 1) > tolerance or abs(fit.offset) > tolerance * fit.size)
            for (kind, name), fit in self._fits.items()
            if name in self._cut and (kind == "weight" or factor is None)
        )
        suspicious = self.manager.tp_size > 1 and self._looks > 0 and changed
        least, most = self._ratios or (math.nan, math.nan)
        self._steered, self._ratios = most if most - least <= SAME * most else None, []
        facts |= dict.fromkeys(SCALES, 0.0) | {"shards changed": suspicious}
        if factor is not None:
            facts |= {"scaled": 1, "factor": factor, "factor²": factor**2, "tolerance": tolerance}
        if self._steered is not None:
            facts |= {"rated": 1, "ratio": self._steered, "ratio²": self._steered**2}
        return facts

    def refuse_different(self, sums: Mapping[str, float]) -> None:
        """Refuse factors and rates that differ, by the sums of `facts`; all ranks call it."""
        factors, ratios = ([sums[name] for name in names] for names in (SCALES[:3], SCALES[-3:]))
        self._require_one(CLIPPED, self._factor(), factors, sums["tolerance"] / max(factors[0], 1))
        self._require_one(STEERED, self._steered, ratios, SAME)
        if sums["shards changed"]:
            self._looks -= 1
            self._compare_shards()

    def _require_one(
        self, words: str, own: float | None, sums: Sequence[float], tolerance: float
    ) -> None:
        """Refuse a number that varies between ranks, by their count, sum and sum of squares."""
        count, total, squares = sums
        mean = total / max(count, 1)
        if count > 1 and squares / count - mean**2 > (tolerance * mean) ** 2:
            everyone = all_gather_object((own, describe_rank()), self.manager.world_group)
            known = [(number, rank) for number, rank in everyone if number is not None]
            texts = [f"by {number:.6g} on {rank}" for number, rank in (min(known), max(known))]
            raise MismatchError(f"{describe_rank()}: {words.format(', '.join(texts))}{BACK}")

    def _look_up(self, model: nn.Module) -> None:
        found = [each for each in parameter_shards(model) if _is_kept(each)]
        first = found[0].tensor if found else None
        like = None if first is None else (first.device, first.dtype)
        self._shards = [each for each in found if (each.tensor.device, each.tensor.dtype) == like]
        self._rounding = 0.0 if first is None else torch.finfo(first.dtype).eps
        self._tolerance = max(SAME, self._rounding / 8)
        self._count = min([ELEMENTS, *(each.tensor.numel() for each in self._shards)])
        self._cut = find_cuts(model).keys() if self.manager.tp_size > 1 else ()

    def _fit(self, kind: str, pairs: Sequence[tuple[Shard, Tensor]]) -> None:
        if pairs:
            shards = [shard for shard, _ in pairs]
            before = torch.stack([kept for _, kept in pairs])
            after = torch.stack([kept for _, kept in self._kept(kind, shards)])
            self._fitted.append((kind, shards, _fits(before, after, self._rounding)))

    def _read(self, residue: Tensor | None) -> float:
        """Read the fits from the device, and return the residue."""
        tensors = [fits.flatten() for *_, fits in self._fitted]
        if residue is not None:
            exact = tensors[0] if tensors else residue
            tensors.append(residue.view(1).to(exact))
        numbers = torch.cat(tensors).tolist() if tensors else []
        for kind, shards, _ in self._fitted:
            for shard in shards:
                self._fits[kind, shard.name] = Fit(*numbers[:4])
                numbers = numbers[4:]
        self._fitted = []
        return numbers[0] if numbers else 0.0

    def _kept(self, kind: str, shards: Iterable[Shard]) -> list[tuple[Shard, Tensor]]:
        """Return copies of `_count` elements of each tensor, spread over its rows and columns."""
        found = []
        for shard in shards:
            values = shard.parameter if kind == "weight" else cast(Tensor, shard.tensor.grad)
            tensor = values.detach()
            stride = tensor.numel() // self._count
            if tensor.ndim > 1 and stride > 1 and stride % tensor.shape[-1] == 0:
                stride -= 1  # this stride would take all elements from one column
            flat = tensor.flatten()[::stride][: self._count].clone()
            found.append((shard, torch.view_as_real(flat).flatten() if flat.is_complex() else flat))
        return found

    def _factor(self) -> float | None:
        """Return the common factor of all gradients of this rank; None if there is none."""
        of_gradients = [fit for (kind, _), fit in self._fits.items() if kind == "gradient"]
        fits = [fit for fit in of_gradients if fit.known >= 0]
        if not fits or not all(fit.known for fit in fits):
            return None
        factors, tolerance = [fit.factor for fit in fits], self._tolerance
        mean = sum(factors) / len(factors)
        one = max(factors) - min(factors) <= tolerance * abs(mean)
        still = all(abs(fit.offset) <= tolerance * fit.size for fit in fits)
        return mean if one and still else None

    def _compare_shards(self) -> None:
        """Refuse fits that differ between shards of a parameter over tp; all ranks call it."""
        own = {key: fit for key, fit in self._fits.items() if key[1] in self._cut and fit.known > 0}
        place = self.manager.grid.coordinates(self.manager.global_rank)._replace(tp=0)
        told = all_gather_object((place, describe_rank(), own), self.manager.world_group)
        first: dict[object, tuple[str, Fit]] = {}
        tolerance = self._tolerance
        for place, rank, fits in told:
            for key, fit in fits.items():
                other, known = first.setdefault((place, key), (rank, fit))
                gap = abs(fit.factor - known.factor) > tolerance * abs(known.factor)
                if gap or abs(fit.offset - known.offset) > tolerance * known.size:
                    texts = [
                        f"times {each.factor:.6g} plus {each.offset:.3g} on {where}"
                        for where, each in ((other, known), (rank, fit))
                    ]
                    what = OF_SHARDS.format(" ".join(key), ", ".join(texts))
                    raise MismatchError(f"{describe_rank()}: {what}{BACK}")


scalings: WeakKeyDictionary[nn.Module, Scaling] = WeakKeyDictionary()  # of parallelized models


def _is_kept(shard: Shard) -> bool:
    """Return whether a shard's gradient is a plain strided tensor with enough elements."""
    grad = shard.tensor.grad
    return type(grad) is Tensor and grad.layout is torch.strided and grad.numel() >= FEWEST


def _fits(before: Tensor, after: Tensor, rounding: float) -> Tensor:
    """Fit after = factor * before + offset in each row of [k, n]; return `Fit` numbers [k, 4]."""
    exact = torch.float32 if before.device.type == "mps" else torch.float64
    before, after = before.to(exact), after.to(exact)
    x, y = before.mean(1, keepdim=True), after.mean(1, keepdim=True)
    factor = ((before - x) * (after - y)).sum(1, True) / (before - x).square().sum(1, True)
    offset = y - factor * x
    size = after.square().mean(1, True).sqrt()
    gap = (after - factor * before - offset).square().mean(1, True).sqrt()
    known = (gap <= 4 * rounding * size).to(exact)
    zero = (before == 0).all(1, True) & (after == 0).all(1, True)
    return torch.cat([factor, offset, size, known.masked_fill(zero, -1.0)], 1)


_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # -> its number of parameters
_hooks: list[Any] = []


def watch(model: nn.Module, manager: ProcessGroupManager) -> Scaling:
    """Check optimizers of a model's parameters at their steps, and return its comparisons."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    return scalings.setdefault(model, Scaling(manager))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Check an optimizer that is new or has more parameters; sample its gradients and rates."""
    taken = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for model, scaling in list(scalings.items()):
        if _checked.get(optimizer) != len(taken):
            _require_own_parameters(optimizer, taken, model)
            _check(optimizer, taken, model, scaling.manager)
        scaling.before_update(taken)
        scaling.note_rates(optimizer)
    _checked[optimizer] = len(taken)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Sample the weights after an optimizer's step."""
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for scaling in list(scalings.values()):
        scaling.after_update(taken)


def _require_own_parameters(optimizer: Optimizer, taken: Container[int], model: nn.Module) -> None:
    """Refuse an optimizer made before `parallelize`, whose parameters are no longer the model's."""
    now = dict(model.named_parameters(remove_duplicate=False))
    before = {name: each() for name, each in terms_of(model).originals.items() if name in now}
    left = [name for name, p in before.items() if p is not now[name] and id(p) in taken]
    if left:
        raise InvalidArgumentError(
            f"{describe_rank()}: {type(optimizer).__name__} has {some(left)} of the plain model, "
            "which parallelize has replaced by this rank's shards, so that these would not be "
            "trained: make the optimizer of model.parameters() after parallelize"
        )


def _check(
    optimizer: Optimizer, taken: Container[int], model: nn.Module, manager: ProcessGroupManager
) -> None:
    """Refuse an optimizer that needs parameters or experts that this rank does not have."""
    names = [shard.name for shard in parameter_shards(model) if id(shard.tensor) in taken]
    if not names:
        return
    scope, kind = update_scope(optimizer), type(optimizer).__name__
    if manager.pp_size > 1 and scope > Scope.PARAMETER:
        raise InvalidArgumentError(
            f"{describe_rank()}: {kind} {scope.words}, but the stages of a pipeline have other "
            "parameters: take an optimizer that updates each parameter by itself, or no pipeline"
        )
    cuts = find_expert_cuts(model)
    stacks = [name for name in names if name in cuts]
    if manager.ep_size > 1 and stacks and scope is not Scope.ELEMENT:
        raise InvalidArgumentError(
            f"{describe_rank()}: {kind} {scope.words}, but each rank has some of the experts that "
            f"{stacks[0]} stacks: give experts an optimizer that treats all elements the same way, "
            "such as AdamW, or do without expert parallelism"
        )

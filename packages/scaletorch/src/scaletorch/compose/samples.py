"""A rotating sample of replicated parameters, compared in the all-reduce that begins each step.

At the end of a step each rank digests some of its replicated parameters, and multiplies each digest
by a weight; the weights of the ranks with the same parameter sum to 0. So equal parameters add 0 to
the next step's all-reduce, and no rank needs the digests of the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ..dist import all_gather_object, all_reduce, get_comm_device, get_rank, group_ranks
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import digest
from .digests import Key, Sides, differing_sides, keyed_pieces, refuse, some, text_hash
from .forward import wait_for_parameters
from .scaling import SCALES, scalings, watch

FACTS = "unsettled", "residue", *SCALES
PERIOD = 16  # steps in which every parameter is sampled once
MODULUS = 2**32  # bounds a rank's term, so that sums over 2**21 ranks are exact in float64
PIECE = 2**20  # elements that `_gaps` compares at a time
EXACT = ("cpu",)  # devices whose kernels sum in a fixed order, so that equal inputs give equal bits
ROUNDING = 1e-3  # allowed gap / largest value on devices whose kernels sum in no fixed order
ADVICE = (
    "Optimizers have other settings or left out a step, or values were changed or loaded on "
    "some ranks alone, or a memory is faulty; go back to a checkpoint from before."
)


class Held(NamedTuple):
    """A parameter of this rank, or a piece of one, that other ranks may hold too."""

    key: Key  # the same on all ranks that hold a replica
    parameter: nn.Parameter
    cut: tuple[int, int, int] | None  # dim, start and length of the piece; None for all

    def values(self) -> Tensor:
        """Return a view of the current values."""
        whole = self.parameter.detach()
        return whole if self.cut is None else whole.narrow(*self.cut)


class Samples:
    """The replicated parameters of this rank, and the sample of the last step."""

    def __init__(self, model: DataParallelBucket, manager: ProcessGroupManager) -> None:
        self._model, self._manager, self._scaling = ref(model), manager, watch(model, manager)
        self._held: list[Held] = []
        # For each step of a period: its sample, and the weights on the device of the first one.
        self._turns: list[tuple[list[Held], Tensor]] = []
        self._known: list[int] = []  # ids of the parameters when they were looked up
        self._unseen: set[str] = set()  # parameters that are no plain dense tensors
        self._left: set[Key] = set()  # not compared any more, since rounding made them differ
        self._turn = 0
        self.settled = False
        self.taken: list[tuple[Key, Tensor]] = []  # digests
        self.residue: Tensor | None = None  # this rank's term of the message: 0-d int64, < 2**32

    def look(self) -> None:
        """Look up the parameters, at first and whenever a period begins; nothing is sent."""
        self._scaling.require_own()
        model = self._model()
        if model is None or (self.settled and self._turn % PERIOD):
            return
        known = [id(each) for each in model.parameters()]
        if known != self._known:
            self._known, self.settled = known, False
            self._held = list(self._look_up(model))

    def settle(self) -> None:
        """Exchange keys to find the ranks that share each parameter; all ranks call it."""
        held = [each for each in self._held if each.key not in self._left]
        hashes = [text_hash(repr(each.key)) for each in held]
        everyone = [set(each) for each in all_gather_object(hashes, self._manager.world_group)]
        own = get_rank(self._manager.world_group)
        turns: list[list[tuple[Held, int]]] = [[] for _ in range(PERIOD)]
        for key, each in sorted(zip(hashes, held, strict=True), key=lambda pair: pair[0]):
            ranks = [rank for rank, keys in enumerate(everyone) if key in keys]
            if len(ranks) > 1:  # these ranks all sample it in the same step
                weight = _weights(key, len(ranks))[ranks.index(own)]
                turns[key % PERIOD].append((each, weight))
        self._turns = []
        for turn in turns:  # moved to the device now: a later copy would make the host wait
            device = turn[0][0].parameter.device if turn else "cpu"
            weights = torch.tensor([weight for _, weight in turn], device=device)
            self._turns.append(([each for each, _ in turn], weights))
        self._turn, self.settled = 0, True

    def take(self) -> None:
        """Digest this step's sample on its device; the next all-reduce sends the result."""
        model = self._model()
        if model is None or not self.settled:
            return
        wait_for_parameters(model)  # no forward may have waited for some of them
        held, weights = self._turns[self._turn % PERIOD]
        self._turn += 1
        if not held:
            return
        try:
            self.taken = [(each.key, digest(each.values())) for each in held]
            numbers = torch.stack([number.to(weights.device) for _, number in self.taken])
            folded = numbers ^ (numbers >> 32)  # products modulo 2**32 depend on low halves only
            self.residue = (folded * weights).sum() % MODULUS
        except RuntimeError as error:  # a device without such a kernel, or without memory for it
            self._left |= {each.key for each in self._held}
            self.settled, self.taken, self.residue = False, [], None
            warnings.warn(
                f"{describe_rank()}: train_step cannot compare parameters between ranks: {error}",
                stacklevel=2,
            )

    def facts(self) -> dict[str, float]:
        """Return this rank's numbers, by the names of `FACTS`."""
        return {"unsettled": not self.settled, **self._scaling.facts(self.residue)}

    def compare(self, sums: Mapping[str, float]) -> None:
        """Compare the sums of all ranks' facts, and then all parameters if residues differ."""
        self._scaling.refuse_different(sums)
        model, parted = self._model(), sums["residue"] % MODULUS != 0
        taken, self.taken, self.residue = dict(self.taken), [], None
        if parted and model is not None:
            wait_for_parameters(model)
            held = [each for each in self._held if each.key not in self._left]
            values = {each.key: each.values() for each in held}
            self._left |= {*_refuse_differences(values, taken, self._manager)}
        if parted or sums["unsettled"]:
            self.settle()

    def _look_up(self, model: DataParallelBucket) -> Iterator[Held]:
        """Yield the parameters with their keys; warn of those that are no plain dense tensors."""
        own = dict(model.named_parameters())
        values = {name: each.detach() for name, each in own.items() if not each.is_meta}
        strided = {name: each for name, each in values.items() if each.layout is torch.strided}
        plain = {name: each for name, each in strided.items() if type(each) is Tensor}
        unseen = values.keys() - plain.keys() - self._unseen
        if unseen:
            self._unseen |= unseen
            names = sorted(unseen)
            warnings.warn(
                f"{describe_rank()}: train_step cannot compare {some(names)} between ranks, since "
                f"these are no plain tensors ({type(values[names[0]]).__name__})",
                stacklevel=4,
            )
        for name, key, piece in keyed_pieces(model, plain, self._manager):
            if piece.numel():
                yield Held(key, own[name], _cut_of(piece, plain[name]))


_samples: WeakKeyDictionary[nn.Module, Samples | None] = WeakKeyDictionary()


def samples_of(model: DataParallelBucket, manager: ProcessGroupManager) -> Samples | None:
    """Return the samples of a model that is about to train; None on one rank or if switched off."""
    if manager.world_size == 1:
        return None
    if model not in _samples:
        _samples[model] = Samples(model, manager)
    return _samples[model]


def train_unsampled(model: DataParallelBucket) -> None:
    """Stop comparing a model's ranks, so that it trains on with a fault; all ranks call it."""
    _samples[model] = None
    scalings.pop(model, None)


def take_sample(model: DataParallelBucket, beside: Iterable[nn.Parameter]) -> None:
    """Sample at the end of a step; not parameters in `no_sync`, where ranks may differ."""
    samples = _samples.get(model)
    if samples is not None and model.require_backward_grad_sync:
        samples.take()
    if model in scalings:
        scalings[model].sample(model, beside)


def _weights(key: int, count: int) -> list[int]:
    """Return a weight for each of `count` ranks; they sum to 0 modulo 2^32."""
    generator = Random(key)
    weights = [generator.randrange(MODULUS) for _ in range(count - 1)]
    return [-sum(weights) % MODULUS, *weights]


def _cut_of(piece: Tensor, whole: Tensor) -> tuple[int, int, int] | None:
    """Return the dim, start and length of a piece; None for the whole tensor."""
    pairs = zip(piece.shape, whole.shape, strict=True)
    dim = next((dim for dim, (own, full) in enumerate(pairs) if own != full), None)
    if dim is None:
        return None
    start = (piece.storage_offset() - whole.storage_offset()) // whole.stride(dim)
    return dim, start, piece.shape[dim]


def _refuse_differences(
    values: Mapping[Key, Tensor], taken: Mapping[Key, Tensor], manager: ProcessGroupManager
) -> list[Key]:
    """Refuse parameters that differ between replicas; return those within rounding over tp."""
    digests = [(key, taken[key] if key in taken else digest(x)) for key, x in values.items()]
    parted = differing_sides(digests, manager)
    if not parted:
        return []
    gaps = _gaps([*parted], values, manager)
    unequal = sorted(parted, key=gaps.__getitem__, reverse=True)
    most = gaps[unequal[0]]
    inexact = sorted({each.device.type for each in values.values()} - {*EXACT})
    devices = {d for each in all_gather_object(inexact, manager.world_group) for d in each}
    if devices and most <= ROUNDING and _over_tp(parted.values(), manager):
        warnings.warn(
            f"{describe_rank()}: {some([key.name for key in unequal])} differ between tp ranks by "
            f"up to {most:.1e} of the largest value, as after sums in no fixed order on "
            f"{', '.join(sorted(devices))}; train_step no longer compares these (check_replicas "
            "does)",
            stacklevel=4,
        )
        return unequal
    own = get_rank(manager.world_group)
    odd = (key for key in gaps if own not in parted[key][0])
    texts = {key: f"up to {gaps[key]:.1e} of the largest value apart" for key in odd}
    refuse({key: parted[key] for key in unequal}, texts, manager, advice=ADVICE)


def _gaps(
    keys: Sequence[Key], values: Mapping[Key, Tensor], manager: ProcessGroupManager
) -> dict[Key, float]:
    """Return the largest gap between replicas / largest value, by key; all ranks call it."""
    group, device = manager.world_group, get_comm_device(manager.world_group)
    real = {k: torch.view_as_real(x) if x.is_complex() else x for k, x in values.items()}
    own = [real[key].numel() if key in real else 0 for key in keys]
    sizes = map(max, *all_gather_object(own, group))
    found: dict[Key, float] = {}
    for key, size in zip(keys, sizes, strict=True):
        most = largest = 0.0
        for start in range(0, size, PIECE):
            count = min(PIECE, size - start)
            both = torch.full((2, count), -torch.inf).to(device, torch.float64)
            if key in real:
                piece = real[key].reshape(-1)[start : start + PIECE].to(device, torch.float64)
                both = torch.stack([piece, -piece]).nan_to_num(torch.inf)
            all_reduce(both, "max", group=group)  # the highest values, and minus the lowest
            most = max(most, float(both.sum(0).nan_to_num(torch.inf, torch.inf).max()))
            largest = max(largest, float(both.nan_to_num(posinf=0.0).max()))
        found[key] = most / (largest or 1.0)
    return found


def _over_tp(all_sides: Iterable[Sides], manager: ProcessGroupManager) -> bool:
    """Return whether replicas differ only between tp coordinates."""
    coordinates = [manager.grid.coordinates(rank).tp for rank in group_ranks(manager.world_group)]
    for sides in all_sides:
        places = [{coordinates[rank] for rank in side} for side in sides]
        if sum(map(len, places)) > len(set().union(*places)):
            return False
    return True

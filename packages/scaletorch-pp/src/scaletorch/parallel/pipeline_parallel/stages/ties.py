"""Parameters that several ranks hold: one value at the start, one summed gradient at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import all_gather_object, group_ranks
from ....dist.dist import exchange
from ....dist.errors import StateError
from ...pg_manager import describe_rank
from ...pg_manager.building import connect, groups_within
from ..splitting.split import Placement

Owners = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter that several ranks hold."""

    names: tuple[str, ...]  # all its names in the whole model
    owners: Owners  # the places in the pipeline of the ranks that hold it, ascending
    parameter: nn.Parameter | None  # None on ranks that do not hold it
    trained: bool  # whether it required grad when the model was split


def find_ties(
    model: nn.Module, placement: Placement, homes: Mapping[int, int], rank: int
) -> list[Tie]:
    """Find the parameters that a split leaves on several ranks, in one order on all ranks.

    `homes` has, for each stage, the place of its rank in the pipeline; `rank` is this rank's place.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    ties = []
    for parameter, aliases in names.items():
        stages = {stage for name in aliases for stage in placement.stages_of(name)}
        owners = sorted({homes[stage] for stage in stages})
        if len(owners) > 1:
            kept = parameter if rank in owners else None
            ties.append(Tie(tuple(aliases), tuple(owners), kept, parameter.requires_grad))
    return ties


def neighbours(stages: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the pairs of places in a pipeline that exchange hidden states, each once."""
    homes = {stage: place for place, own in enumerate(stages) for stage in own}
    crossings = ({homes[stage], homes[stage + 1]} for stage in range(len(homes) - 1))
    return sorted({(min(pair), max(pair)) for pair in crossings if len(pair) == 2})


def groups_of_owners(
    group: ProcessGroup, owner_sets: Iterable[Owners], number: int
) -> dict[Owners, ProcessGroup]:
    """Make and connect a group for each set of owners of tied parameters; all ranks call it.

    On the pipeline's own group the exchanges of owners would mix with other ranks' messages. The
    owners' sets are in the same order on all ranks, and `number` is the first number for torch's
    group names, agreed by all ranks. The result has the groups of this rank.
    """
    ranks = group_ranks(group)
    owners_of = {tuple(ranks[place] for place in owners): owners for owners in owner_sets}
    groups = groups_within(group, owners_of, number)
    for members, members_group in groups.items():
        connect(members_group, combinations(range(len(members)), 2))
    return {owners_of[members]: members_group for members, members_group in groups.items()}


class TiedGradients:
    """Keeps values and gradients of tied parameters equal on all their owners.

    The ties are in the same order on every rank. `ranks` are the pipeline's global ranks, `rank` is
    this rank's place among them. Owners without a group of their own in `groups` use `group`.
    """

    def __init__(
        self,
        ties: Iterable[Tie],
        ranks: Sequence[int],
        rank: int,
        group: ProcessGroup | None,
        groups: Mapping[Owners, ProcessGroup],
    ) -> None:
        self.ties = tuple(ties)
        self._ranks, self._rank, self._group, self._groups = ranks, rank, group, groups
        self._pending = False  # whether `.grad` holds a postponed step's gradients, not summed yet

    def share_values(self) -> None:
        """Copy the first owner's values to every owner."""
        for parameter, tie in self._own():
            if not parameter.is_meta:
                first, *rest = (self._ranks[owner] for owner in tie.owners)
                own, data = self._rank == tie.owners[0], parameter.detach()
                sends = [(data, peer) for peer in rest] if own else []
                exchange(sends, [] if own else [(data, first)], self._group_of(tie))

    def check(self, held: Iterable[nn.Parameter]) -> None:
        """Check that no other parameter has replaced a tied one, among the `held` ones."""
        found = set(held)
        for parameter, tie in self._own():
            if parameter not in found:
                raise StateError(
                    f"{describe_rank()}: {tie.names[0]}, which several ranks hold, has been "
                    "replaced by another parameter, so its gradients would not be summed; keep the "
                    "parameter and copy values into it (load_state_dict without assign=True)"
                )

    def require_same_frozen(self) -> None:
        """Check that each tied parameter is frozen on all its owners or on none; all ranks call it.

        The error is raised on every rank of the pipeline, owner or not.
        """
        own = [tie.trained and tie.parameter is not None and not tie.parameter.requires_grad
               for tie in self.ties]  # fmt: skip
        flags = all_gather_object(own, self._group)
        for index, tie in enumerate(self.ties):
            _require_all_or_none([owner for owner in tie.owners if flags[owner][index]], tie)

    def begin(self) -> None:
        """Drop gradients that `sync` has summed, except on each parameter's first owner.

        Called before the first backward of an accumulation. The next `sync` adds the gradients of
        all owners, so it would count an earlier sum once for each of them.
        """
        if not self._pending:
            for parameter, tie in self._own():
                if tie.trained and self._rank != tie.owners[0]:
                    parameter.grad = None

    def postpone(self) -> None:
        """Leave this step's gradients to the next `sync`."""
        self._pending = True

    def sync(self) -> None:
        """Sum gradients over the owners, in rank order: the same bits on every owner.

        An owner without a gradient counts as zeros. If no owner has one, it stays None.
        """
        self._pending = False
        found: list[tuple[list[int], Tie]] = []
        for parameter, tie in self._own():
            if tie.trained:
                # On the CPU, so that the host can read them without waiting for the device.
                flags = [parameter.grad is not None, not parameter.requires_grad]
                gathered = self._gather(torch.tensor(flags, dtype=torch.uint8), tie)
                held, frozen = torch.stack(gathered).bool().unbind(1)
                found.append(([o for o, is_ in zip(tie.owners, frozen, strict=True) if is_], tie))
                if held.any():
                    parameter.grad = _total(self._gather(_gradient_of(parameter), tie))
        for owners, tie in found:  # only now: an earlier error would leave other owners waiting
            _require_all_or_none(owners, tie)

    def _own(self) -> Iterator[tuple[nn.Parameter, Tie]]:
        return ((tie.parameter, tie) for tie in self.ties if tie.parameter is not None)

    def _group_of(self, tie: Tie) -> ProcessGroup | None:
        return self._groups.get(tie.owners, self._group)

    def _gather(self, own: Tensor, tie: Tie) -> list[Tensor]:
        """Return the tensors of all owners, in rank order."""
        tensors = {o: own if o == self._rank else torch.empty_like(own) for o in tie.owners}
        receives = [(tensor, self._ranks[o]) for o, tensor in tensors.items() if o != self._rank]
        exchange([(own, peer) for _, peer in receives], receives, self._group_of(tie))
        return [*tensors.values()]


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter, requires_grad=False)
    gradient = parameter.grad.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _require_all_or_none(frozen: Sequence[int], tie: Tie) -> None:
    if 0 < len(frozen) < len(tie.owners):
        raise StateError(
            f"{describe_rank()}: ranks {list(frozen)} of the pipeline have frozen "
            f"{tie.names[0]}, which ranks {list(tie.owners)} hold; freeze it on all of them, by "
            "its name on each, or on none"
        )


def _total(gradients: Sequence[Tensor]) -> Tensor:
    """Add in the given order, in float32 at least, and round once: the same bits on each owner."""
    dtype = gradients[0].dtype
    total = gradients[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for gradient in gradients[1:]:
        total += gradient
    return total.to(dtype)

"""Experts between shards of sequences: which tokens a tp rank has there, once all is sharded."""

from __future__ import annotations

from torch import nn

from ..dist.errors import InvalidArgumentError
from ..parallel.expert_parallel.building import DividedExperts, share_tokens
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel.building import WholeSequence, find_cuts


def settle_tokens(model: nn.Module, manager: ProcessGroupManager) -> None:
    """Have tp ranks share the tokens of experts in blocks that see whole sequences.

    Elsewhere each tp rank has tokens of its own between shards of sequences, and experts that every
    tp rank has (etp = tp) need a layer around them that gathers these.

    Args:
        model: With experts divided, layers sharded and sequences shared.
        manager: The grid.

    Raises:
        InvalidArgumentError: There is no such layer, or it cannot tell rows of all experts apart.
    """
    wholes = (each for each in model.modules() if isinstance(each, WholeSequence))
    inside = {each for whole in wholes for each in whole.modules()}
    cuts = find_cuts(model)
    for name, each in model.named_modules():
        if not isinstance(each, DividedExperts):
            continue
        if each in inside:
            if manager.etp_size == 1:
                share_tokens(each, manager.tp_group)
            continue
        if manager.etp_size == 1:
            continue
        cut = any(parameter.startswith(f"{name}.") for parameter in cuts)
        if each.takes_all or not cut:
            why = "are called with rows for all of them" if cut else "are not cut over tp"
            raise InvalidArgumentError(
                f"the experts '{name}' {why}, and with sequence parallelism each tp rank has "
                "tokens of its own: take etp = 1, or do without sequence parallelism"
            )

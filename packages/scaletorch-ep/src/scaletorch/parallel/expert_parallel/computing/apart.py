"""Whether experts can be apart: each token's computed by itself, from its own rows of the weights.

Only then can they be on other ranks than the token's other experts. No shape tells, so a few rows
of a module's first call are asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import evaluating
from ..exchange.dispatch import Dispatched
from .pairs import Experts

_ROWS, _WEIGHTS = 4, (0.3, 0.6)  # tokens that are asked, and weights that do not add up to 1
_CROWD = 60  # rows before them for one expert, so that a capacity would have ended there
_NEAR = 0.05  # of the results: above the rounding of any dtype
_ALONE = (
    "return for a token something else than the sum of what they return for it with each of its "
    "experts alone: tokens go to the ranks of their experts one by one, so what is done with all "
    "weights or results of a token (normalising them, adding the token itself) or with other "
    "tokens belongs into the block that calls them"
)


def why_mixed(
    module: nn.Module,
    experts: Experts,
    came: Dispatched,
    stacked: Sequence[str],
    here: int,
    total: int,
) -> InvalidArgumentError | None:
    """Return why a module's experts cannot be apart, though it could be cut; None if they can.

    None too where somebody would see calls that are of no step: hooks inside of the module, a mode
    that watches operations, another strategy around it.

    Args:
        module: With the experts of this rank.
        experts: Its own forward.
        came: Rows of experts of this rank.
        stacked: Names of its parameters that have rows along dim 0 for each expert here, as many
            for each.
        here: Number of experts here.
        total: Number of experts on all ranks.
    """
    if not len(came.hidden) or _watched(module, came.hidden):
        return None
    with _aside(module, came.hidden) as leaves:
        results, together = _ask(experts, came, min(here, len(_WEIGHTS)))
        if not results.isfinite().all():
            return None
        top_k = min(here, came.top_k_index.shape[1])
        why = None if _alike(results.detach()[:top_k], together.detach()) else _ALONE
        if why is None and results.requires_grad:
            why = _why_elsewhere(leaves, _uses(results, leaves), stacked, (here, total))
    if why is None:
        return None
    return InvalidArgumentError(f"{describe_rank()}: experts {type(module).__name__} {why}")


def _watched(module: nn.Module, hidden: Tensor) -> bool:
    inside = [each for each in module.modules() if each is not module]
    return (
        hidden.is_meta
        or torch.is_inference_mode_enabled()
        or _get_current_dispatch_mode() is not None
        or type(module).__mro__[1].__name__ != "DividedExperts"
        or any(each._forward_hooks or each._forward_pre_hooks for each in inside)
        or any(type(each) is not nn.Parameter for each in module.parameters())
    )


@contextmanager
def _aside(module: nn.Module, like: Tensor) -> Iterator[dict[str, Tensor]]:
    """Let a module be called as if it was not; yield what stands for its parameters meanwhile."""
    tables = {name: each._parameters for name, each in module.named_modules()}
    before = [(table, dict(table)) for table in tables.values()]
    buffers = [(each, each._version, each.clone()) for each in module.buffers()]
    devices = [] if like.is_cpu else [like.device.index or 0]
    twins = {each: _leaf(each) for each in module.parameters()}
    with ExitStack() as entered:
        entered.enter_context(torch.random.fork_rng(devices, device_type=like.device.type))
        entered.enter_context(evaluating(module))
        entered.enter_context(torch.enable_grad())
        entered.enter_context(saved_tensors_hooks(lambda x: x, lambda x: x))  # no recomputation's
        try:
            for table in tables.values():
                table.update({n: twins[p] for n, p in table.items() if p is not None})
            yield {
                f"{prefix}.{name}".lstrip("."): leaf
                for prefix, table in tables.items()
                for name, leaf in table.items()
                if leaf is not None
            }
        finally:
            for table, own in before:
                table.update(own)
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


def _leaf(parameter: nn.Parameter) -> Any:
    leaf = parameter.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _ask(experts: Experts, came: Dispatched, several: int) -> tuple[Tensor, Tensor]:
    """Return results of single experts, [experts, rows, H], and of K of them for fewer rows."""
    rows = came.hidden[:_ROWS].detach()
    numbers = torch.arange(several, device=rows.device)
    weights = came.top_k_weights.new_tensor(_WEIGHTS)[:several]
    each = torch.cat((numbers[:1].expand(_CROWD), numbers.repeat_interleave(len(rows))))[:, None]
    many = torch.cat((rows[:1].expand(_CROWD, -1), rows.repeat(several, 1)))
    results = experts(many, each, weights[each])[_CROWD:]
    top_k = min(several, came.top_k_index.shape[1])
    fewer = rows[: (len(rows) + 1) // 2].clone()
    given = (each[None, :top_k].expand(len(fewer), -1) for each in (numbers, weights))
    together = experts(fewer, *(each.contiguous() for each in given))
    return results.view(several, len(rows), -1), together


def _alike(results: Tensor, together: Tensor) -> bool:
    parts = results[:, : len(together)].double()
    furthest = (together - parts.sum(0)).abs().max()
    return bool(furthest <= _NEAR * parts.abs().sum(0).max())


def _uses(results: Tensor, leaves: Mapping[str, Tensor]) -> list[list[Tensor]]:
    """Return for each expert that was asked which elements of each parameter it uses."""
    wanted = [each for each in leaves.values() if each.requires_grad]
    unlike = torch.linspace(1, 2, results[0].numel(), device=results.device)  # no sum is constant
    found = []
    for expert in results:
        total = (expert.flatten() * unlike.to(expert.dtype)).sum()
        gradients = torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True)
        found.append([
            torch.zeros_like(leaf, dtype=torch.bool) if grad is None else grad != 0
            for grad, leaf in zip(gradients, wanted, strict=True)
        ])  # fmt: skip
    return found


def _why_elsewhere(
    leaves: Mapping[str, Tensor],
    uses: list[list[Tensor]],
    stacked: Sequence[str],
    numbers: tuple[int, int],
) -> str | None:
    """Return which weights of single experts lie elsewhere than in their rows."""
    here, total = numbers
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    for name, *used in zip(names, *uses, strict=True):
        if name in stacked:
            rows = [each.reshape(here, -1).any(1) for each in used]
            if any(row[:e].any() or row[e + 1 :].any() for e, row in enumerate(rows)):
                return (
                    f"use weights of one another: each takes more of '{name}' than its own rows "
                    "along dim 0, and the other rows may be on other ranks"
                )
        elif _of_single(used, total):
            return (
                f"have weights of single experts in '{name}' {tuple(leaves[name].shape)}, which "
                "stays whole, as it has no row for each along dim 0, and experts are numbered anew "
                f"on each rank: stack it as [{total}, ...], one parameter for all experts"
            )
    return None


def _of_single(used: Sequence[Tensor], total: int) -> bool:
    """Return whether experts use a whole parameter, but not the same elements of it."""
    if len(used) > 1:
        return bool((used[0] ^ used[1]).any()) and not bool((used[0] & used[1]).any())
    return 0 < int(used[0].sum()) * total <= used[0].numel()

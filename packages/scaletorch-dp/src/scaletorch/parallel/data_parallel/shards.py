"""What an optimizer updates on this rank: whole parameters, or this rank's ranges of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shard:
    """A flat range of one parameter, and the tensor that the optimizer has for it.

    Attributes:
        name: The parameter's name in the model.
        parameter: The parameter itself.
        start: First element of the range in ``parameter.flatten()``.
        stop: One past the last.
        tensor: The parameter itself, or a float32 (at least) tensor of ``stop - start`` elements:
            flat, or of the parameter's shape where it is whole. Its ``grad`` is the gradient.
        replicated: Whether every rank of the data-parallel group has the same; else no other has
            any of its elements.
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    tensor: Tensor
    replicated: bool

    @property
    def is_master(self) -> bool:
        """Whether ``tensor`` has values of its own, of more digits than the parameter's."""
        return self.tensor.dtype != self.parameter.dtype


def parameter_shards(model: nn.Module) -> list[Shard]:
    """Return what an optimizer of the model updates on this rank, in the order of parameters.

    Args:
        model: A data-parallel wrapper, whose optimizer `shard_optimizer` may have sharded, or any
            module. Frozen parameters are left out; a shared one has its first name.
    """
    found: list[Shard] | None = getattr(model, "optimizer_shards", None)
    if found is not None:
        return list(found)
    return [
        Shard(name, each, 0, each.numel(), each, replicated=True)
        for name, each in model.named_parameters()
        if each.requires_grad
    ]

"""Lineage of tensors: the earlier tensors from which each was computed, by autograd's graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

_Source = tuple[Any, ...]


class Use(NamedTuple):
    """The use of a parameter as input `place` of a graph node."""

    source: Any
    node: Any
    place: int


class Lineage:
    """Maps tensors, identified by their place in autograd's graph or their memory, to lines.

    While a module runs, the tensors that it takes have other names.
    """

    def __init__(self) -> None:
        self._lines: dict[_Source, int] = {}
        self._kept: list[Tensor] = []  # keeps noted tensors alive, so their memory is not reused
        self._hidden: list[list[tuple[_Source, int]]] = []

    def line_of(self, tensor: Tensor) -> int:
        """Return the line under which a tensor was last noted; -1 if it is new."""
        return self._lines.get(_source(tensor), -1)

    def note(self, tensor: Tensor, line: int) -> None:
        """Note a tensor; within a call, a tensor known before gets its old line back at the end."""
        source = _source(tensor)
        if source in self._lines:
            if self._hidden:
                self._hidden[-1].append((source, self._lines[source]))
        elif tensor.grad_fn is None:
            self._kept.append(tensor)
        self._lines[source] = line

    @contextmanager
    def call(self) -> Iterator[None]:
        """Restore, at the end of a module's call, the names that tensors had before it."""
        self._hidden.append([])
        try:
            yield
        finally:
            for source, line in reversed(self._hidden.pop()):
                self._lines[source] = line

    def parents(self, tensor: Tensor) -> tuple[list[int], list[Use]]:
        """Return the lines of the nearest tensors noted, and uses of leaves, behind a tensor."""
        lines: list[int] = []
        used: list[Use] = []
        waiting: list[Any] = [tensor.grad_fn]
        visited: set[Any] = {tensor.grad_fn}
        while waiting:
            node = waiting.pop()
            edges: tuple[Any, ...] = () if node is None else node.next_functions
            for place, (following, number) in enumerate(edges):
                line = self._lines.get((following, number))
                if line is None and hasattr(following, "variable"):
                    line = self._lines.get(_source(following.variable))
                    if line is None:
                        used.append(Use(following.variable, node, place))
                if line is not None:
                    lines.append(line)
                elif following is not None and following not in visited:
                    visited.add(following)
                    waiting.append(following)
        return lines, used


def _source(tensor: Tensor) -> _Source:
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor._version

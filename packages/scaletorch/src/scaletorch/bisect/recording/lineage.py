"""Lineage of tensors: the earlier ones from which one was computed, by autograd's graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

_Source = tuple[Any, ...]


class Use(NamedTuple):
    """A parameter, or a noted tensor, goes into a node of the graph as one of its inputs."""

    of: Any
    node: Any
    place: int


class Lineage:
    """Knows tensors by their place in autograd's graph, or by their memory.

    A tensor that is passed on is the same one under another name: within the module that it went
    into it goes by that name, so that a graph of names follows the modules.
    """

    def __init__(self) -> None:
        self._lines: dict[_Source, int] = {}
        self._kept: list[Tensor] = []  # memory of a tensor that was met is not another's
        self._hidden: list[list[tuple[_Source, int]]] = []

    def line_of(self, tensor: Tensor) -> int:
        """Return the line that a tensor was last noted as; -1 if it is new."""
        return self._lines.get(_source(tensor), -1)

    def note(self, tensor: Tensor, line: int) -> None:
        """Note a tensor; within a call, until it ends if it was known before."""
        source = _source(tensor)
        if source in self._lines:
            if self._hidden:
                self._hidden[-1].append((source, self._lines[source]))
        elif tensor.grad_fn is None:
            self._kept.append(tensor)
        self._lines[source] = line

    @contextmanager
    def call(self) -> Iterator[None]:
        """Forget, at the end of a module's call, the names that tensors had within it."""
        self._hidden.append([])
        try:
            yield
        finally:
            for source, line in reversed(self._hidden.pop()):
                self._lines[source] = line

    def parents(self, tensor: Tensor) -> tuple[list[Use], list[Use]]:
        """Return the nearest noted tensors that one was computed from, and the leaves."""
        lines: list[Use] = []
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
                    lines.append(Use(line, node, place))
                elif following is not None and following not in visited:
                    visited.add(following)
                    waiting.append(following)
        return lines, used


def _source(tensor: Tensor) -> _Source:
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor._version

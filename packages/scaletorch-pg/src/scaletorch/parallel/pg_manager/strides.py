"""Groups of counted things as strides: the numbers that some digits of a mixed radix reach."""

from __future__ import annotations

# (stride, size) of the digits that vary in a group, slowest first.
Steps = list[tuple[int, int]]


def exchange(number: int, width: int, *, fast: int, slow: int) -> int:
    """Count in the order (fast, slow, width) what is `number` in the order (slow, fast, width)."""
    block, rest = divmod(number, width)
    slower, faster = divmod(block, fast)
    return (faster * slow + slower) * width + rest


def first_of(number: int, steps: Steps) -> int:
    """Return the first member of the group that holds `number`."""
    return number - sum(number // stride % size * stride for stride, size in steps)


def position_of(number: int, steps: Steps) -> int:
    """Return the place of `number` in its group."""
    position = 0
    for stride, size in steps:
        position = position * size + number // stride % size
    return position


def walk(first: int, steps: Steps) -> list[int]:
    """Return the numbers reached from `first` by every combination of steps, ascending."""
    numbers = [first]
    for stride, size in steps:
        numbers = [number + index * stride for number in numbers for index in range(size)]
    return numbers


def at(first: int, steps: Steps, position: int) -> int:
    """Return the number at a position of the group, counted round: -1 is the last one."""
    number = first
    for stride, size in reversed(steps):
        position, index = divmod(position, size)
        number += index * stride
    return number

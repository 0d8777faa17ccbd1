"""What a device reaches, measured while all ranks compute: products, attention, memory, updates."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...dist import barrier
from ...dist.devices import current_device
from ...models import Llama, LlamaConfig

ROUNDS = 5
TOKENS, HEADS, WIDTH = 256, 4, 64
LENGTHS = (32, 128, 512, 1024)  # of attention
SIZES = (64, 128, 256, 512, 1024)  # of square weights
ELEMENTS = (2**10, 2**14, 2**17, 2**20, 2**22)  # of tensors that are only moved
_PARAMETERS, _TENSORS = 2**23, 16
_BEYOND_CACHES = 2**25  # bytes that take turns, so that none is in a cache still

Figures = dict[str, Any]


def measure(seconds: float, dtype: torch.dtype) -> Figures:
    """Measure this rank, all ranks at once.

    Args:
        seconds: For each figure, about.
        dtype: Of parameters and activations.

    Returns:
        Pairs (size of an operation, its amount a second) for "matmul", "matmul backward",
        "attention", "attention backward" and "other"; seconds "overhead"; bytes a second
        "updating"; and "spread", by how much rounds differ.
    """
    device = current_device()
    gauge = _Gauge(seconds, device)
    options: Any = {"dtype": dtype, "device": device}
    found: Figures = {"overhead": _overhead(gauge, options)}
    for name, pairs in (
        ("matmul", _products(gauge, options)), ("attention", _attention(gauge, options)),
    ):  # fmt: skip
        forward, backward = zip(*pairs, strict=True)
        found[name], found[f"{name} backward"] = [*forward], [*backward]
    found["other"] = [*_moving(gauge, options, found["overhead"])]
    found["updating"] = _updating(gauge, options)
    return {**found, "spread": gauge.spread(), "device": str(device), "memory": _memory(device)}


class _Gauge:
    """Times calls in rounds that all ranks begin together."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        self._seconds, self._device = seconds, device
        self._spreads: list[float] = []

    def __call__(self, run: Callable[[], Any]) -> float:
        """Return the median seconds of a call."""
        once = min(self._time(run, 1) for _ in range(3))
        calls = max(1, int(self._seconds / ROUNDS / max(once, 1e-7)))
        barrier()
        rounds = sorted(self._time(run, calls) for _ in range(ROUNDS))
        middle = statistics.median(rounds)
        self._spreads.append((rounds[-2] - rounds[1]) / 2 / middle)
        return middle

    def spread(self) -> float:
        """Return the median of half the distance between quartiles, as a share."""
        return statistics.median(self._spreads)

    def _time(self, run: Callable[[], Any], calls: int) -> float:
        self._wait()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        self._wait()
        return (time.perf_counter() - begin) / calls

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


class _Count(TorchDispatchMode):
    """Counts operations that are no views, as descriptions do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        views = returns and all(r.alias_info and not r.alias_info.is_write for r in returns)
        self.number += not views
        return func(*args, **(kwargs or {}))


def _overhead(gauge: _Gauge, options: Any) -> float:
    """Return seconds of an operation of a layer so small that nothing else takes any.

    What Python and autograd do around operations is in it.
    """
    model = Llama(LlamaConfig(16, 16, 16, 4, 2, 2)).to(**options)
    ids = torch.zeros(1, 4, dtype=torch.long, device=options["device"])

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()

    step()
    with _Count() as count:
        step()
    return gauge(step) / float(count.number)


def _products(gauge: _Gauge, options: Any) -> Iterator[tuple[tuple[float, float], ...]]:
    """Yield forward and backward of linear layers: flops of a product, flops a second."""
    for size in SIZES:
        item = options["dtype"].itemsize
        copies = min(256, max(2, _BEYOND_CACHES // (item * size * (size + 3 * TOKENS))))
        turns = [
            (
                torch.randn(TOKENS, size, requires_grad=True, **options),
                nn.Parameter(torch.randn(size, size, **options)),
            )
            for _ in range(copies)
        ]
        flops = 2.0 * TOKENS * size * size
        forward, backward = _both(gauge, F.linear, turns)
        yield (flops, flops / forward), (flops, 2 * flops / backward)


def _attention(gauge: _Gauge, options: Any) -> Iterator[tuple[tuple[float, float], ...]]:
    """Yield forward and backward of causal attention."""
    for length in LENGTHS:
        shape = (max(1, LENGTHS[-1] // length), HEADS, length, WIDTH)
        query, key, value = (torch.randn(shape, requires_grad=True, **options) for _ in range(3))
        flops = 2.0 * shape[0] * HEADS * length * length * WIDTH  # half of the scores are seen

        forward, backward = _both(
            gauge,
            partial(F.scaled_dot_product_attention, is_causal=True),
            [(query, key, value)],
        )
        yield (flops, flops / forward), (2.5 * flops, 2.5 * flops / backward)


def _both(
    gauge: _Gauge, run: Callable[..., Tensor], turns: Sequence[tuple[Tensor, ...]]
) -> tuple[float, float]:
    """Return the seconds of a forward and of its backward, of inputs that take turns."""
    one, other = cycle(turns), cycle([(run(*each), each) for each in turns])
    gradient = torch.randn_like(run(*turns[0]))

    def back() -> None:
        output, leaves = next(other)
        output.backward(gradient, retain_graph=True)
        for leaf in leaves:
            leaf.grad = None

    forward = _keeping(lambda: run(*next(one)), gradient.nbytes)
    return gauge(forward), gauge(back)


def _moving(gauge: _Gauge, options: Any, overhead: float) -> Iterator[tuple[float, float]]:
    """Yield bytes that an operation of a mix moves, and bytes a second beside its overhead."""
    for elements in ELEMENTS:
        shape = (elements // 1024, 16, 64)
        one, two = (torch.randn(shape, **options) for _ in range(2))
        turned = torch.randn(16, elements // 1024, 64, **options).transpose(0, 1)
        mix: tuple[tuple[Callable[[], Tensor], int], ...] = (
            (partial(torch.add, one, two), 3),
            (partial(torch.mul, one, two), 3),
            (partial(torch.mul, turned, two), 3),
            (partial(torch.cat, (one[..., 32:], one[..., :32]), -1), 2),
            (partial(F.silu, one), 2),
            (partial(torch.pow, one, 2), 2),
            (partial(torch.log_softmax, one, -1), 2),
        )
        runs = [_keeping(run, one.nbytes * len(mix)) for run, _ in mix]
        took = gauge(partial(_all, runs))
        moved = sum(times for _, times in mix) * one.nbytes
        least = 0.2 * took  # small ones are overhead and nothing else
        yield moved / len(mix), moved / max(took - overhead / 3 * len(mix), least)


def _all(runs: Sequence[Callable[[], None]]) -> None:
    for run in runs:
        run()


def _keeping(run: Callable[[], Tensor], size: int) -> Callable[[], None]:
    """Return a call whose results live on for a while, as they do until backward."""
    kept: deque[Tensor] = deque(maxlen=max(1, _BEYOND_CACHES // size))
    return lambda: kept.append(run())


def _updating(gauge: _Gauge, options: Any) -> float:
    parameters = [
        nn.Parameter(torch.randn(_PARAMETERS // _TENSORS, **options)) for _ in range(_TENSORS)
    ]
    for each in parameters:
        each.grad = torch.randn_like(each)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    optimizer.step()
    return 7 * sum(each.nbytes for each in parameters) / gauge(optimizer.step)


def _memory(device: torch.device) -> int:
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

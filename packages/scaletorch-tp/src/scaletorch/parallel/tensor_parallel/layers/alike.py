"""Subclasses of torch's linear layer that compute what it does, found by trying them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

_HARMLESS = frozenset({"forward", "__module__", "__doc__", "__qualname__", "__firstlineno__",
                       "__static_attributes__", "__annotations__", "__parameters__"})  # fmt: skip
_SIZES = 5, 3  # in and out features of a small one
_ROWS = 2, 4
_SCALES = 1.0, 1e9, 1e-9  # of inputs: some layers clip large ones, or round


def computes_as_linear(module: nn.Module) -> bool:
    """Return whether a module is an `nn.Linear`, or writes its forward in other words alone.

    Such a class, as FalconLinear, has nothing of its own beside its forward, and a small one of it
    maps an input as torch's does, with a bias and without. One that quantises, masks or scales
    does not; nor does one that clips.
    """
    kind = type(module)
    if kind in (nn.Linear, NonDynamicallyQuantizableLinear):
        return True
    if not issubclass(kind, nn.Linear):
        return False
    above = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    plain = all(vars(each).keys() <= _HARMLESS for each in above)
    own = {n for n in vars(module) if not n.startswith("_")}
    if not plain or own - vars(nn.Linear(1, 1)).keys():
        return False
    return all(_alike(kind, scale, bias=bias) for scale in _SCALES for bias in (True, False))


def _alike(kind: type[nn.Linear], scale: float, *, bias: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    small = nn.Linear(*_SIZES, bias=bias, device="meta")
    for name, p in list(small.named_parameters()):
        drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        small.register_parameter(name, nn.Parameter(drawn))
    x = torch.randn(*_ROWS, _SIZES[0], generator=generator, dtype=torch.float64) * scale
    expected = functional.linear(x, small.weight, small.bias)
    small.__class__ = kind
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = small(x)
    except Exception:  # of a class that is not ours
        return False
    return (
        isinstance(found, Tensor)
        and found.shape == expected.shape
        and torch.allclose(found, expected, rtol=1e-9, atol=1e-12 * scale)
    )

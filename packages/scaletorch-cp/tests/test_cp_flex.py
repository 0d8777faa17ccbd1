"""The kernel of flex_attention on CPU: uncompiled for its numbers, counted for its compilations."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from unittest import mock

import pytest
import torch
from dense_attention import assert_close, dense, random_tensors
from test_cp_attention import differentiated, draw
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import attention, kernels
from scaletorch.parallel.context_parallel.kernels import cuda, flex, tile
from scaletorch.parallel.context_parallel.kernels.block import Operands
from scaletorch.parallel.context_parallel.masks import CAUSAL, FULL

CPU = torch.device("cpu")


@contextmanager
def _uncompiled():
    """Run what would be compiled as it is: all scores at once, which CPU can go back through."""
    get_torch_obj_rule_map()  # once for all: the compiler must not take the next line's for torch's
    with ExitStack() as stack:
        for owner, name, value in [
            (flex_attention, "_validate_device", lambda *_: None),
            (torch.compiler, "is_dynamo_compiling", lambda: True),
            (flex, "_compiled", lambda: flex._flex),
        ]:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextmanager
def _alone():
    """Let CPU have the kernel of devices, and nothing else: the tile fails."""
    with (
        _uncompiled(),
        mock.patch.dict(kernels.KERNELS, cpu=(kernels.FLEX,)),
        mock.patch.object(flex, "DTYPES", (torch.float64, torch.float32)),
        mock.patch.multiple(tile, forward=None, backward=None),
    ):
        yield


@pytest.fixture
def uncompiled():
    with _uncompiled():
        yield


_inputs = partial(random_tensors, batch=2)


def _by_flex(cases):
    with _alone():
        return differentiated(cases)


@pytest.mark.parametrize("world_size", [1, 3])
def test_attention_of_ranks_by_this_kernel_alone(world_size):
    random, cases = Random(world_size), []
    for _ in range(40):
        method, kind, (*sizes, dim, value_dim, rows), *rest = draw(random, world_size)
        cases.append((method, kind, (*sizes, 4 * dim, 4 * value_dim, rows), *rest))
    for errors in run_ranks(_by_flex, world_size, cases, timeout=200):
        for case, error in zip(cases, errors, strict=True):
            assert error < 1e-11, case


SHAPES = [  # heads, key/value heads, rows, keys, head dim, that of values
    (4, 2, 300, 257, 16, 16), (4, 2, 1, 1, 16, 16), (4, 1, 219, 219, 96, 96),
    (2, 1, 219, 130, 160, 160), (4, 2, 70, 219, 48, 32),
]  # fmt: skip


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("band", [(0, -1), (400, None), (None, -300), (-2, 3), (-20, None)])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_block(shape, band):
    *sizes, value_dim = shape
    for dtype, limit in {torch.float64: 1e-11, torch.float32: 3e-5}.items():
        tensors = _inputs(*sizes, value_dim=value_dim, dtype=dtype)
        expected = dense(*tensors, -0.2, band, 5.0)
        out, lse = flex.forward(*tensors[:3], -0.2, band, 5.0)
        grads = flex.backward(Operands(tensors[3], *tensors[:3], out, lse), -0.2, band, 5.0)
        assert {x.dtype for x in (out, lse, *grads)} == {dtype}
        assert_close([out, lse, *grads], expected, limit)
        unseeing = expected[1] == -math.inf
        assert not out[unseeing].any()
        assert not grads[0][unseeing].any()


@pytest.mark.usefixtures("uncompiled")
def test_half_precision_loses_no_more_than_the_tile():
    tensors = _inputs(4, 2, 219, 219, 64, dtype=torch.bfloat16)
    out, lse = flex.forward(*tensors[:3], 0.125, CAUSAL, 20.0)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    x = Operands(tensors[3], *tensors[:3], out, lse)
    mine = [out, lse, *flex.backward(x, 0.125, CAUSAL, 20.0)]
    for a, b in zip(mine, dense(*tensors, 0.125, CAUSAL, 20.0), strict=True):
        assert (a.double() - b).norm() < 6e-3 * b.norm()


def test_training_after_inference_mode():
    flex.block_mask.cache_clear()
    flex._constant.cache_clear()
    q, k, v, grad = _inputs(4, 2, 130, 130, 16)
    with _alone():
        with torch.inference_mode():
            expected = attention(q, k, v, causal=True, softcap=3.0)
        leaf = q.clone().requires_grad_()
        out = attention(leaf, k, v, causal=True, softcap=3.0)
        out.backward(grad)
    assert torch.equal(out, expected)
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("band", [FULL, CAUSAL, (-200, 0), (-150, 150), (-900, -500), (300, None)])
@pytest.mark.parametrize(("rows", "keys"), [(512, 512), (300, 700), (700, 130), (3, 5)])
def test_masks_are_those_of_create_block_mask(rows, keys, band):
    def sees(batch, head, row, key):
        low = True if band[0] is None else key - row >= band[0]
        high = True if band[1] is None else key - row <= band[1]
        return low & high & (key >= 0)

    mine = flex.block_mask(rows, keys, band, CPU)
    expected = flex_attention.create_block_mask(sees, None, None, rows, keys, "cpu")
    assert mine.shape == expected.shape
    for name in ("kv", "full_kv", "q", "full_q"):
        count, order = (getattr(mine, f"{name}_{x}") for x in ("num_blocks", "indices"))
        theirs = [getattr(expected, f"{name}_{x}") for x in ("num_blocks", "indices")]
        assert torch.equal(count, theirs[0])
        assert order.dtype == theirs[1].dtype == torch.int32
        for mine_row, their_row, n in zip(order[0, 0], theirs[1][0, 0], count[0, 0], strict=True):
            assert torch.equal(mine_row[:n], their_row[:n])
    assert flex.block_mask(rows, keys, band, CPU) is mine


@pytest.fixture
def cards(monkeypatch):
    """Let meta tensors have the kernels of a CUDA device, whose operators take all but caps."""
    for name in ("flash", "cudnn", "efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda *_: True)
    monkeypatch.setitem(kernels.KERNELS, "meta", kernels.KERNELS["cuda"])


HALF, SINGLE = torch.bfloat16, torch.float32
CHOICES = {  # dtype, head dims, band, cap, kernel
    "causal": (HALF, 64, 64, CAUSAL, None, "cudnn"),
    "full in float32": (SINGLE, 64, 64, FULL, None, "efficient"),
    "window": (HALF, 64, 64, (-9, 0), None, "flash"),
    "window beside the last key": (HALF, 64, 64, (-9, -5), None, "flex"),
    "window in float32": (SINGLE, 64, 64, (-9, 0), None, "flex"),
    "cap": (HALF, 64, 64, CAUSAL, 30.0, "flex"),
    "cap in a window": (HALF, 64, 64, (-9, 0), 30.0, "flex"),
    "cap in float32": (SINGLE, 64, 64, FULL, 30.0, "flex"),
    "head dim": (HALF, 36, 36, (-9, 0), None, "flex"),
    "head dim of values": (HALF, 192, 128, CAUSAL, None, "flex"),
    "small head dim": (HALF, 12, 12, (-9, 0), 30.0, "tile"),
    "cap in float64": (torch.float64, 64, 64, CAUSAL, 30.0, "tile"),
}


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("case", CHOICES.values(), ids=CHOICES)
def test_what_is_chosen_on_a_card(case, is_new, monkeypatch):
    monkeypatch.setattr(cuda, "_is_new", lambda device: is_new)
    dtype, dim, value_dim, band, cap, name = case
    name = "flash" if name == "cudnn" and not is_new else name
    tensors = _inputs(4, 2, 40, 40, dim, value_dim=value_dim, dtype=dtype)
    q, k, v = (x.to("meta") for x in tensors[:3])
    assert kernels.kernel_for(q, k, v, band, cap).name == name
    # CPU keeps its own.
    plain = band in (FULL, CAUSAL) and dim == value_dim
    own = "cpu flash" if cap is None and plain else "tile"
    assert kernels.kernel_for(*tensors[:3], band, cap).name == own


@pytest.fixture
def compiled(monkeypatch):
    """Compile for a backend that runs graphs as they are, and list these and what was compiled."""
    graphs, functions, plain = [], [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiling(function, **options):
        functions.append(function)
        return plain(function, backend=backend, **options)

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch, "compile", compiling)
    flex._compiled.cache_clear()
    yield graphs, functions
    flex._compiled.cache_clear()
    torch.compiler.reset()


STEPS = [(256, 256, CAUSAL, 5.0), (260, 400, (-30, 99), 3.0), (300, 500, FULL, 5.0)]


def test_it_is_compiled_once(compiled):
    """One function, and two graphs: without gradients and with."""
    graphs, functions = compiled
    for rows, keys, band, cap in STEPS:
        tensors = _inputs(4, 2, rows, keys, 20)
        out, lse = flex.forward(*tensors[:3], cap / 10, band, cap)
        grads = flex.backward(Operands(tensors[3], *tensors[:3], out, lse), cap / 10, band, cap)
        assert_close([out, lse, *grads], dense(*tensors, cap / 10, band, cap), 1e-11)
    assert functions == [flex._flex]
    assert len(graphs) == 2


@pytest.fixture
def forgetting():
    """Forget what was refused."""
    flex._compiled.cache_clear()
    yield
    flex._refused.clear()
    flex._compiled.cache_clear()


@pytest.mark.usefixtures("forgetting")
def test_a_device_without_a_compiler_has_the_tile_and_one_warning(monkeypatch):
    def no_compiler(*_):
        raise RuntimeError("Cannot find a working triton installation\nmore of it")

    monkeypatch.setattr(flex, "_compiled", lambda: no_compiler)
    monkeypatch.setitem(kernels.KERNELS, "cpu", (kernels.FLEX,))
    q, k, v, grad = _inputs(4, 2, 30, 40, 20, dtype=torch.float32)
    with pytest.warns(UserWarning, match="does not run on cpu.*Cannot find a working triton"):
        out, lse = kernels.forward(q, k, v, 0.3, FULL, 2.0)
    assert kernels.kernel_for(q, k, v, FULL, 2.0) is kernels.TILE
    grads = kernels.backward(Operands(grad, q, k, v, out, lse), 0.3, FULL, 2.0)
    assert_close([out, lse, *grads], dense(q, k, v, grad, 0.3, FULL, 2.0), 1e-4)
    others = _inputs(4, 2, 30, 40, 32, dtype=torch.float32)[:3]
    assert kernels.kernel_for(*others, FULL, 2.0) is kernels.FLEX


class Watching(TorchDispatchMode):
    """A mode under which torch.compile compiles nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("forgetting")
def test_where_nothing_is_compiled_scores_do_not_exist_at_once(monkeypatch):
    monkeypatch.setattr(flex, "flex_attention", None)
    q, k, v, _ = _inputs(4, 2, 30, 40, 20)
    with Watching(), pytest.warns(UserWarning, match="NotCompiledError"):
        out, _ = flex.forward(q, k, v, 0.3, FULL)
    torch.testing.assert_close(out, tile.forward(q, k, v, 0.3, FULL)[0])
    assert not flex._refused  # the next call may be compiled


@pytest.mark.usefixtures("forgetting")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_errors_of_the_device_are_not_taken_for_the_compilers(error, monkeypatch):
    def fails(*_):
        raise error("of the device")

    monkeypatch.setattr(flex, "_compiled", lambda: fails)
    with pytest.raises(error, match="of the device"):
        flex.forward(*_inputs(2, 2, 9, 9, 16)[:3], 1.0, FULL)
    assert not flex._refused

"""Kernels for one block of keys, and the merge of blocks, against dense attention in float64."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from dense_attention import assert_close, dense, random_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.parallel.context_parallel import kernels, update_out_and_lse
from scaletorch.parallel.context_parallel.kernels import cpu_flash, cuda, tile
from scaletorch.parallel.context_parallel.kernels.block import Operands, merge_into
from scaletorch.parallel.context_parallel.masks import CAUSAL, FULL

BOUNDS = st.none() | st.integers(-40, 40)
# The table takes what the CPU's fused kernel does not do to the tile.
by_kernel = pytest.mark.parametrize("kernel", [kernels, tile], ids=["table", "tile"])


def _run(kernel, q, k, v, grad, scale, band, *cap):
    """Return out, lse, dq, dk, dv of one block that is everything there is."""
    out, lse = kernel.forward(q, k, v, scale, band, *cap)
    return [out, lse, *kernel.backward(Operands(grad, q, k, v, out, lse), scale, band, *cap)]


@by_kernel
@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    rows=st.integers(1, 37),
    keys=st.integers(1, 37),
    dim=st.integers(1, 9),
    band=st.tuples(BOUNDS, BOUNDS),
    step=st.sampled_from([1, 5, 16, 256]),
)
def test_any_band_of_any_shape(kernel, batch, kv_heads, group, rows, keys, dim, band, step):
    inputs = random_tensors(kv_heads * group, kv_heads, rows, keys, dim, batch=batch, seed=rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tile.SIZES, "cpu", tile.Size(step, step * 20))
        mine = _run(kernel, *inputs, 0.3, band)
    assert_close(mine, dense(*inputs, 0.3, band), 1e-11)


@by_kernel
@pytest.mark.parametrize(
    ("heads", "band"),
    [
        ((2, 2), FULL), ((2, 2), (-99, 0)), ((2, 2), (512, None)),
        ((4, 1), CAUSAL), ((4, 1), (-700, -300)), ((4, 1), (-40, 41)),
    ],
)  # fmt: skip
def test_blocks_larger_than_the_kernels_tiles(kernel, heads, band):
    inputs = random_tensors(*heads, 781, 781, 16)
    assert_close(_run(kernel, *inputs, 0.25, band), dense(*inputs, 0.25, band), 1e-11)
    in_float32 = [x.float() for x in inputs]
    mine = _run(kernel, *in_float32, 0.25, band)
    assert {x.dtype for x in mine} == {torch.float32}
    assert_close(mine, dense(*in_float32, 0.25, band), 2e-5)


@by_kernel
@pytest.mark.parametrize(
    ("rows", "keys", "band"),
    [
        (33, 33, (0, -1)), (33, 33, (40, None)), (33, 33, (None, -40)), (33, 33, (35, 38)),
        (0, 3, FULL), (3, 0, FULL),
    ],
)  # fmt: skip
def test_blocks_that_nothing_sees(kernel, rows, keys, band):
    inputs = random_tensors(4, 2, rows, keys, 8)
    if not rows * keys:
        assert not cpu_flash.fits(*inputs[:3], FULL)
    out, lse, *grads = _run(kernel, *inputs, 0.3, band)
    assert out.shape == (1, 4, rows, 8)
    assert (lse == -math.inf).all()
    assert not any(x.any() for x in (out, *grads))


@by_kernel
@pytest.mark.parametrize("band", [FULL, CAUSAL, (-3, 2)])
def test_strided_operands_and_their_safety(kernel, band):
    """As models hold them, [B, L, H, D]; with another stride in the last dim; and expanded."""
    plain = random_tensors(4, 2, 21, 21, 8, batch=2)
    expected = _run(kernel, *plain, 0.3, band)
    layouts = [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
    ]
    for layout in layouts:
        inputs = [layout(x) for x in plain]
        before = [x.clone() for x in inputs]
        assert_close(_run(kernel, *inputs, 0.3, band), expected, 1e-13)
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    ones = torch.ones((), dtype=torch.float64).expand(plain[3].shape)
    mine = _run(kernel, *plain[:3], ones, 0.3, band)
    assert_close(mine, dense(*plain[:3], ones.clone(), 0.3, band), 1e-12)


@by_kernel
def test_large_scores_do_not_overflow(kernel):
    q, k, v, grad = random_tensors(1, 1, 9, 9, 4)
    for cap in ((), (0.5,)):
        mine = _run(kernel, q * 1e4, k * 1e4, v, grad, 1.0, CAUSAL, *cap)
        assert all(x.isfinite().all() for x in mine)


@pytest.mark.parametrize("kv_heads", [16, 1])
def test_gradients_of_a_group_are_summed_in_float32(kv_heads):
    tensors = random_tensors(16, kv_heads, 800, 800, 64, dtype=torch.bfloat16)
    mine, exact = _run(kernels, *tensors, 0.125, FULL), dense(*tensors, 0.125, FULL)
    for a, b in zip(mine[3:], exact[3:], strict=True):
        assert (a.double() - b).norm() <= 4e-3 * b.norm()


def test_merge_equals_attention_over_all_keys():
    q, k, v, _ = random_tensors(2, 2, 7, 10, 4)
    expected, expected_lse = kernels.forward(q, k, v, 0.5, FULL)
    left = kernels.forward(q, k[:, :, :3], v[:, :, :3], 0.5, FULL)
    right = kernels.forward(q, k[:, :, 3:], v[:, :, 3:], 0.5, FULL)
    copies = [x.clone() for x in (*left, *right)]
    for first, second in ((left, right), (right, left)):
        out, lse = update_out_and_lse(*update_out_and_lse(None, None, *first), *second)
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-13, atol=1e-13)
        whole, whole_lse = (
            torch.zeros(1, 2, 9, 4).double(),
            torch.full((1, 2, 9), -math.inf).double(),
        )
        for part in (first, second):
            merge_into(whole[:, :, 1:8], whole_lse[:, :, 1:8], *part)
        torch.testing.assert_close(whole[:, :, 1:8], expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(whole_lse[:, :, 1:8], expected_lse, rtol=1e-13, atol=1e-13)
        assert not whole[:, :, ::8].any()
    for before, after in zip(copies, (*left, *right), strict=True):
        assert torch.equal(before, after), "an argument was changed"


def test_merge_keeps_rows_that_nothing_has_seen():
    nothing = torch.full((1, 1, 3), -math.inf)
    out, lse = torch.zeros(1, 1, 3, 2), nothing.clone()
    block_out, block_lse = torch.ones(1, 1, 3, 2), torch.tensor([[[-math.inf, 0.5, 2.0]]])
    block_out[:, :, 0] = 0
    merged, merged_lse = update_out_and_lse(out, lse, block_out, block_lse)
    merge_into(out, lse, block_out, block_lse)
    for a, b in ((merged, merged_lse), (out, lse)):
        assert torch.equal(a, block_out)
        assert torch.equal(b, block_lse)
    zeros = torch.zeros_like(out)
    again = update_out_and_lse(merged, merged_lse, zeros, nothing)
    merge_into(out, lse, zeros, nothing)
    for a, b in (again, (out, lse)):
        assert torch.equal(a, block_out)
        assert torch.equal(b, block_lse)


def test_merge_is_differentiable_with_unseen_rows():
    out = torch.zeros(1, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    lse = torch.tensor([[[-math.inf, 0.3]]], dtype=torch.float64, requires_grad=True)
    block_lse = torch.tensor([[[-math.inf, 0.5]]], dtype=torch.float64)
    merged, _ = update_out_and_lse(out, lse, torch.ones_like(out), block_lse)
    merged.sum().backward()
    assert out.grad.isfinite().all()
    assert lse.grad.isfinite().all()


FUSED = {kernel.name: kernel for kernel in cuda.KERNELS}


def _half(heads, kv_heads, rows, keys, device="meta"):
    inputs = random_tensors(heads, kv_heads, rows, keys, 64, batch=2, dtype=torch.bfloat16)
    return [x.to(device) for x in inputs]


class Recorded(TorchDispatchMode):
    """Records the arguments of operators, by the names in their schemas."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        arguments = func._schema.arguments
        given = {each.name: each.default_value for each in arguments}
        given |= dict(zip(given, args, strict=False)) | (kwargs or {})
        if "is_causal" in given:
            self.calls.append(given)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize(("band", "keys"), [(FULL, 24), (CAUSAL, 40)])
def test_fused_operators_are_asked_for_no_dropout_and_for_this_mask(kernel, band, keys):
    """Shapes and dtypes alone: nothing is computed on meta tensors."""
    q, k, v, grad = _half(4, 2, 40, keys)
    with Recorded() as asked:
        out, lse, *grads = _run(kernel, q, k, v, grad, 0.1, band)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert len(asked.calls) == 2
    heads = 2 if kernel is cuda.FLASH else 1
    for call in asked.calls:
        assert call["dropout_p"] == 0
        assert call["is_causal"] is (band is CAUSAL)
        assert call["scale"] == 0.1
        assert call.get("max_q", 40) == 40
        assert call.get("max_k", keys) == keys
        assert call.get("grad_input_mask", [True, True, True, False]) == [True, True, True, False]
        if kernel is not cuda.EFFICIENT:  # the others take grouped heads as they are
            assert call["key"].shape[heads] == call["value"].shape[heads] == 2


@pytest.mark.parametrize("kernel", FUSED.values(), ids=FUSED)
def test_backwards_are_given_memory_in_the_order_that_they_read(kernel):
    """The efficient one reads `grad_out` and `out` as [B, L, H, D], whatever their strides."""
    q, k, v, grad = _half(4, 4, 40, 40)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="meta")
    for x in (grad, grad.mT.contiguous().mT, torch.empty(q.shape, device="meta")):
        with Recorded() as asked:
            kernel.backward(Operands(x, q, k, v, out, lse), 0.1, CAUSAL)
        given = asked.calls[-1]
        for tensor in (given.get("grad_out", given.get("grad_out_")), given["out"]):
            assert tensor.dtype == torch.bfloat16
            assert (tensor if kernel is cuda.FLASH else tensor.transpose(1, 2)).is_contiguous()


class Flash:
    """Torch's operators of flash by their conventions: [B, L, H, D], bands from the last key on."""

    @staticmethod
    def _band(q, k, causal, left, right):
        shift = k.shape[1] - q.shape[1]
        assert causal == ((left, right) == (-1, 0))
        return (None if left < 0 else shift - left, None if right < 0 else shift + right)

    def _flash_attention_forward(
        self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale,
        window_size_left, window_size_right,
    ):  # fmt: skip
        assert (cum_q, cum_k, dropout, debug) == (None, None, 0.0, False)
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        band = self._band(q, k, causal, window_size_left, window_size_right)
        out, lse = tile.forward(*(x.transpose(1, 2) for x in (q, k, v)), scale, band)
        return out.transpose(1, 2), lse.masked_fill(lse == -math.inf, math.inf), None, None, None

    def _flash_attention_backward(
        self, grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, state, unused,
        *, scale, window_size_left, window_size_right,
    ):  # fmt: skip
        assert (max_q, max_k, dropout) == (q.shape[1], k.shape[1], 0.0)
        assert lse.max() == math.inf or (lse > -math.inf).all()
        band = self._band(q, k, causal, window_size_left, window_size_right)
        operands = Operands(*(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse)
        return [x.transpose(1, 2) for x in tile.backward(operands, scale, band)]


@pytest.mark.parametrize("rows", [24, 40])
@pytest.mark.parametrize("band", [FULL, (None, 16), (-7, 3), (-7, None), (None, 20), (16, 16)])
def test_flash_is_asked_for_windows_by_its_convention(band, rows):
    inputs = random_tensors(6, 2, rows, 40, 8)
    window = cuda.window_of(*inputs[:2], band)
    if window is None:  # a band that lies beside the last row's own key
        assert band not in (FULL, (None, 16)) or rows == 24
        return
    with mock.patch.object(cuda, "aten", Flash()):
        found = _run(cuda.FLASH, *inputs, 0.3, band)
    assert_close(found, dense(*inputs, 0.3, band), 1e-12)


def _reference_kernel(lse_layout):
    """An operator on CPU with the calling convention of the fused ones, as a kernel."""

    def backward(operands, scale, band):
        assert operands.lse.shape == operands.q.shape[:3]
        return cpu_flash.backward(operands, scale, band)

    def forward(q, k, v, scale, band):
        out, lse = cpu_flash.forward(q, k, v, scale, band)
        return out, lse_layout(lse)

    return cuda.fused("stand-in", lambda *_: True, forward, backward)


@pytest.mark.parametrize("band", [FULL, CAUSAL])
@pytest.mark.parametrize(
    "lse_layout",
    [lambda x: x, lambda x: x.unsqueeze(-1), lambda x: F.pad(x, (0, 3), value=math.inf)],
    ids=["flash", "cudnn", "efficient"],
)
def test_frame_of_fused_operators(lse_layout, band):
    kernel, inputs = _reference_kernel(lse_layout), random_tensors(6, 2, 29, 29, 8)
    assert_close(_run(kernel, *inputs, 0.3, band), dense(*inputs, 0.3, band), 1e-12)


def test_table_falls_back_to_the_tile():
    q, k, v, _ = random_tensors(2, 2, 8, 8, 8)
    assert kernels.kernel_for(q, k, v, FULL) is kernels.CPU_FLASH
    assert kernels.kernel_for(q, k, v, (-2, 0)) is kernels.TILE
    half = [x.to("meta", torch.bfloat16) for x in (q, k, v)]
    assert kernels.kernel_for(*half, FULL) is kernels.TILE
    # PyTorch says of its kernels for CUDA that they could not run here.
    assert not any(kernel.fits(*half, FULL) for kernel in cuda.KERNELS)
    unlike = [
        (q, k, v, (-2, 0)), (q, k[:, :, 1:], v[:, :, 1:], CAUSAL),
        (q, k, v[..., :4], FULL), (q.float(), k, v, FULL),
    ]  # fmt: skip
    assert not any(cpu_flash.fits(*each) for each in unlike)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("band", [FULL, CAUSAL])
def test_kernels_of_cuda(name, band):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    kernel = FUSED[name]
    tensors = [x.to("cuda") for x in random_tensors(4, 2, 200, 200, 64, dtype=torch.float16)]
    if not kernel.fits(*tensors[:3], band):
        pytest.skip(f"{name} does not fit this device")
    mine = [x.cpu() for x in _run(kernel, *tensors, 0.125, band)]
    assert_close(mine, dense(*(x.cpu() for x in tensors), 0.125, band), 1e-2)

"""The table of reduce operations, and the recipes that make every dtype reducible."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.wire.recipes import REDUCE_OPS, fold, op_name, recipe_for

INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
)  # fmt: skip


def test_names_in_any_case_aliases_and_objects_mean_the_same():
    for name, raw in REDUCE_OPS.items():
        assert op_name(name.upper()) == op_name(name.title()) == name
        assert op_name(raw) == op_name(ReduceOp(raw)) == name
    assert op_name("prod") == op_name("PROD") == "product"
    assert op_name("avg") == "mean"


@pytest.mark.parametrize("op", ["", "summ", "mean ", None, 0, 3, b"sum", ReduceOp.PREMUL_SUM])
def test_an_unknown_op_lists_all(op):
    with pytest.raises(InvalidArgumentError, match="sum, mean, product, min, max, band, bor, bxor"):
        op_name(op)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("band", torch.float32), ("bor", torch.bfloat16), ("bxor", torch.complex64),
        ("max", torch.complex128), ("product", torch.complex64), ("sum", torch.float8_e4m3fn),
        ("max", torch.float8_e5m2), ("sum", torch.uint64),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_by_name(op, dtype):
    with pytest.raises(InvalidArgumentError, match=f"{dtype} with op '{op}'"):
        recipe_for(op, dtype)


def reduced(op, *rows):
    """Reduce tensors of one rank each as a backend would."""
    recipe = recipe_for(op, rows[0].dtype)
    blocks = torch.stack([recipe.pack(row.contiguous()) for row in rows])
    result = recipe.unpack(fold(blocks, recipe.run), len(rows))
    return torch.empty_like(rows[0]).copy_(result)


@settings(deadline=None)
@given(dtype=st.sampled_from(INTEGERS), size=st.integers(1, 9), draw=st.data())
def test_the_mean_of_integers_is_exact_and_truncates_toward_zero(dtype, size, draw):
    limits = torch.iinfo(dtype)
    # The sum is taken in int64: it must fit there.
    low, high = max(limits.min, -(2**63) // size + 1), min(limits.max, 2**63 // size - 1)
    values = draw.draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
    result = reduced("mean", *(torch.tensor([value], dtype=dtype) for value in values))
    total = sum(values)
    assert result.dtype == dtype
    assert result.item() == (abs(total) // size) * (1 if total >= 0 else -1)


@settings(deadline=None)
@given(
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    op=st.sampled_from(("min", "max")),
    values=st.lists(st.floats(allow_nan=True), min_size=1, max_size=6),
)
def test_min_and_max_of_floats_order_all_and_keep_a_nan(dtype, op, values):
    rows = [torch.tensor([value], dtype=torch.float64).to(dtype) for value in values]
    result = reduced(op, *rows)
    expected = getattr(torch.stack(rows), f"a{op}")(0)
    assert result.dtype == dtype
    assert torch.equal(result.isnan(), expected.isnan())
    assert result.isnan().all() or torch.equal(result, expected)
    zeros = torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype)
    assert reduced(op, *zeros).signbit() == (op == "min")


def test_the_mean_of_float16_does_not_overflow():
    big = torch.tensor([60000.0], dtype=torch.float16)
    assert reduced("mean", big, big).item() == 60000.0

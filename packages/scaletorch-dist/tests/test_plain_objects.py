"""Objects as bytes: pickled, or plain where pickle is switched off; exact types and values back."""

import collections
import datetime
import enum
import itertools
import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.objects.packing import Terms, dump_object, load_object


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    """A string that is not plain."""


Point = collections.namedtuple("Point", "x y")
PICKLED, PLAIN = Terms(), Terms(allow_pickle=False)


def travelled(x, terms):
    return load_object(bytearray(dump_object(x, terms)), terms)


def image(x):
    """What must be as before: types, order and bits, NaNs and signs of zeros too."""
    kind = type(x)
    if kind is float:
        return kind, struct.pack("d", x)
    if kind is complex:
        return kind, struct.pack("dd", x.real, x.imag)
    if kind in (list, tuple):
        return kind, [image(entry) for entry in x]
    if kind is torch.Tensor:
        flat = x.detach().contiguous().view(-1).clone().view(torch.uint8)
        return kind, x.dtype, x.shape, x.requires_grad, bytes(flat.tolist())
    if isinstance(x, (np.ndarray, np.generic)):
        return kind, x.dtype.type, x.shape, x.tolist() if x.dtype.kind == "M" else x.tobytes()
    return kind, x


_NAMES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu"
)
TORCH_DTYPES = [getattr(torch, name) for name in _NAMES.split()]
OBJECTS = [
    *(None, True, False, 0, -1, 255, 256, 2**63 - 1, -(2**63), 2**63, -(2**64), 10**400, -(10**99)),
    *(0.0, -0.0, math.inf, math.nan, 5e-324, 1j, complex(-0.0, math.nan)),
    *("", "text", "é\0\udc80\U0001f600", "\0", b"", b"\0\xff", bytearray(), bytearray(b"x")),
    *(bytes(200_000), bytearray(200_000), "x" * 200_000, [*range(-5, 300), 0.5, None, True]),
    *([], (), {}, set(), frozenset(), [[]], {1: {}}, frozenset({(1, 2)}), {1, "a"}),
    *([1, None, "a", [2.5, (b"x", {3})]], {1: "a", "1": 1, None: [], (1, 2): {"k": {}}}),
    *(slice(None), slice(1, "a", (2,)), range(5), range(10**30, 0, -7), range(0)),
    *(torch.Size([]), torch.Size([2, 3]), torch.float32, torch.bfloat16, torch.quint8),
    *(torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")),
    *(datetime.date(2000, 2, 29), Path("/a/b c"), Path(), [Path("a"), Path("b")]),
    datetime.datetime(1999, 12, 31, 23, 59, 59, 999999),
    *(datetime.timedelta(-1, 3, 7), datetime.timedelta.max),
    *(np.float32(1.5), np.int64(-1), np.bool_(True), np.uint8(255), np.complex64(1j)),
    *(np.array(3), np.empty((0, 3)), np.arange(6).reshape(2, 3)[:, ::2]),
    *(np.array(["a", "bcd"]), np.array([b"a"]), np.array([True, False])),
    np.array(["2020-01-01"], "M8[D]"),
    *(torch.tensor(3), torch.empty(0, 3), torch.ones(2, 3)[:, 1], torch.ones(3).expand(2, 3)),
    *(torch.ones(2, requires_grad=True), torch.tensor([1 + 2j]).conj()),
    torch._neg_view(torch.ones(2)),
]


both_ways = pytest.mark.parametrize("terms", [PICKLED, PLAIN], ids=["pickled", "plain"])


@both_ways
def test_objects_come_back_as_they_were(terms):
    for x in OBJECTS:
        assert image(travelled(x, terms)) == image(x), x
    both = travelled(OBJECTS, terms)
    assert image(both) == image(OBJECTS)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@both_ways
def test_tensors_of_every_dtype(terms):
    for dtype, shape in itertools.product(TORCH_DTYPES, [(), (0,), (2, 3)]):
        count = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
        x = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
        back = travelled([0, x], terms)[1]
        assert image(back) == image(x)
        assert back.is_contiguous()
        assert back.untyped_storage().nbytes() == x.nbytes


@both_ways
def test_what_comes_twice(terms):
    inner, whole = [1], torch.ones(1000)
    some = whole[:2]
    back = travelled([inner, [inner], some, (some,), whole], terms)
    assert back[0] is back[1][0]
    assert back[2] is back[3][0]
    assert [x.untyped_storage().nbytes() for x in back[2::2]] == [8, 4000]
    back[2][0] = 5
    assert back[4][0] == 1
    inner.append(inner)
    back = travelled(inner, terms)
    assert back[1] is back


NOT_PLAIN = {
    "Point": Point(1, 2),
    "Text": Text("a"),
    "Colour": Colour.RED,
    "test_plain_objects.image": image,
    "datetime.timezone": datetime.datetime.now(datetime.UTC),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_anything_else_is_refused_by_name(name):
    for x in (NOT_PLAIN[name], [1, (NOT_PLAIN[name],)], {"a": NOT_PLAIN[name]}):
        with pytest.raises(InvalidArgumentError, match=f"{name} is not plain"):
            dump_object(x, PLAIN)


def test_what_is_pickled_is_not_read_without_leave():
    with pytest.raises(InvalidArgumentError, match="what arrived is not plain"):
        load_object(dump_object(1), PLAIN)
    for damaged in (dump_object([1, torch.ones(9)], PLAIN)[:-40], b"PK\3\4", b"\x80\5"):
        with pytest.raises(InvalidArgumentError, match="does not unpickle"):
            load_object(bytearray(damaged))


def test_numpy_is_not_needed():
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from scaletorch.dist.objects.packing import Terms, dump_object, load_object\n"
        "import torch\n"
        "for terms in (Terms(), Terms(allow_pickle=False)):\n"
        "    content = dump_object([1, torch.ones(2)], terms)\n"
        "    print(load_object(content, terms)[1].tolist())\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "[1.0, 1.0]\n" * 2, done.stderr

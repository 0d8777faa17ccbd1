"""The codec of plain objects: exact types back, nothing else taken, no bytes that crash it."""

import collections
import contextlib
import datetime
import enum
import math
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist.objects.codec import (
    MAGIC,
    MalformedError,
    NotPlainError,
    decode,
    encode,
    hashing,
)
from scaletorch.dist.objects.codec.stream import DEPTH


class Colour(enum.IntEnum):
    """An int that is not plain."""

    RED = 1


def image(x):
    """What must be as before: types, order and bits, NaNs and signs of zeros too."""
    kind = type(x)
    if kind is float:
        return kind, struct.pack("d", x)
    if kind is complex:
        return kind, struct.pack("dd", x.real, x.imag)
    if kind in (list, tuple):
        return kind, [image(entry) for entry in x]
    if kind in (set, frozenset):
        return kind, sorted((image(entry) for entry in x), key=repr)
    if kind is dict:
        return kind, [(image(key), image(value)) for key, value in x.items()]
    if kind is slice:
        return kind, image((x.start, x.stop, x.step))
    if kind is torch.Tensor:
        flat = x.detach().contiguous().view(-1).clone().view(torch.uint8)
        return kind, x.dtype, x.shape, x.requires_grad, bytes(flat.tolist())
    if kind is np.ndarray:
        return kind, x.dtype.str, x.shape, x.tobytes()
    if isinstance(x, np.generic):
        return kind, x.tobytes()
    return kind, x


def assert_travels(x):
    assert image(decode(encode(x))) == image(x)


_NAMES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu"
)
TORCH_DTYPES = [getattr(torch, name) for name in _NAMES.split()]
PLAIN = [
    *(None, True, False, 0, -1, 255, 256, 2**63 - 1, -(2**63), 2**63, -(2**64), 10**400, -(10**99)),
    *(0.0, -0.0, math.inf, math.nan, 5e-324, 1j, complex(-0.0, math.nan)),
    *("", "text", "é\0\udc80\U0001f600", "\0", b"", b"\0\xff", bytearray(), bytearray(b"x")),
    *([], (), {}, set(), frozenset(), [[]], [()], [{}], ((),), {1: {}}),
    *([1, None, "a", [2.5, (b"x", {3})]], {1: "a", "1": 1, None: [], (1, 2): {"k": {}}}),
    *([{"a": 1, "b": 2}] * 2, [{"a": 1}, {"b": 1}], [{1: 1}, {True: 1}, {1.0: 1}], [True, 1, 1.0]),
    *(slice(None), slice(1, "a", (2,)), range(5), range(10**30, 0, -7), range(0)),
    *(torch.Size([]), torch.Size([2, 3]), torch.float32, torch.bfloat16, torch.quint8),
    *(torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")),
    datetime.date(2000, 2, 29),
    *(Path("/a/b c"), Path(), [Path("a"), Path("b")]),
    datetime.datetime(1999, 12, 31, 23, 59, 59, 999999, fold=1),
    *(datetime.timedelta(-1, 3, 7), datetime.timedelta.max),
    *(np.float32(1.5), np.int64(-1), np.bool_(True), np.uint8(255), np.complex64(1j)),
    *(np.float16(0.1), [np.float32(1), np.int8(2), 3, np.float32(4)]),
    *(np.array(3), np.empty((0, 3)), np.arange(6).reshape(2, 3)[:, ::2]),
    np.asfortranarray(np.ones((2, 3))),
    *(np.arange(4, dtype=">i4"), np.array(["a", "bcd"]), np.array([b"a"]), np.array([True, False])),
    *(np.array(["2020-01-01"], "M8[D]"), np.array([3], "m8[25us]"), np.array(["NaT"], "M8")),
    *(torch.tensor(3), torch.empty(0, 3), torch.ones(2, 3)[:, 1], torch.ones(3).expand(2, 3)),
    *(torch.ones(2, requires_grad=True), torch.tensor([1 + 2j]).conj()),
    torch._neg_view(torch.ones(2)),
]  # fmt: skip


@pytest.mark.parametrize("x", PLAIN, ids=lambda x: f"{type(x).__name__}-{x!r:.20}")
def test_plain_objects(x):
    assert_travels(x)
    assert_travels([x, 1, "b"])
    assert_travels({"a": [x], "b": (x,)} if type(x) in (int, str) else {"a": [x]})


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_tensors_of_every_dtype(dtype, shape):
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    x = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    assert_travels(x)
    back = decode(encode([0, x]))[1]
    assert back.is_contiguous()
    assert back.untyped_storage().nbytes() == x.nbytes


keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats())
leaves = st.one_of(
    *(keys, st.complex_numbers(), st.builds(bytearray, st.binary()), st.dates()),
    *(st.datetimes(), st.timedeltas(), st.sampled_from(TORCH_DTYPES)),
    st.integers(-(2**62), 2**62).map(torch.tensor),
    st.lists(st.floats(width=32)).map(torch.tensor),
    st.lists(st.integers(0, 255)).map(lambda x: np.array(x, np.uint8)),
)
objects = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.sets(keys),
        st.frozensets(st.one_of(keys, st.tuples(keys, keys))),
        st.lists(st.fixed_dictionaries({"id": keys, "value": inner})),
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(objects)
def test_any_plain_object(x):
    assert_travels(x)


@settings(max_examples=300, deadline=None)
@given(objects, st.randoms(use_true_random=False), st.integers(1, 4))
def test_damaged_bytes_are_an_error_or_another_object(x, chance, count):
    data = encode(x)
    for _ in range(count):
        place = chance.randrange(len(data))
        kind = chance.randrange(4)
        if kind == 0:
            data[place] = chance.randrange(256)
        elif kind == 1:
            data[place : place + chance.randrange(1, 9)] = b""
        elif kind == 2:
            data[place:place] = chance.randbytes(chance.randrange(1, 9))
        else:
            data[place : place + 8] = struct.pack("q", chance.choice((-1, 2**62, 2**31, 1 << 40)))
        data = data or bytearray(1)
    with contextlib.suppress(MalformedError):
        decode(data)


@settings(max_examples=300, deadline=None)
@given(st.binary())
def test_any_bytes_are_an_error_or_an_object(tail):
    for head in (b"", MAGIC):
        with contextlib.suppress(MalformedError):
            decode(head + tail)


@pytest.mark.parametrize("x", PLAIN[::7], ids=lambda x: f"{type(x).__name__}")
def test_cut_and_longer_bytes_are_an_error(x):
    data = encode([x, [1, 2]])
    for length in range(len(data)):
        with pytest.raises(MalformedError):
            decode(data[:length])
    with pytest.raises(MalformedError, match="more bytes"):
        decode(data + b"\0")


Point = collections.namedtuple("Point", "x y")


class Text(str):
    """A string that is not plain."""


NOT_PLAIN = {
    "object": object(),
    "Point": Point(1, 2),
    "Text": Text("a"),
    "Colour": Colour.RED,
    "OrderedDict": collections.OrderedDict(a=1),
    "Parameter": torch.nn.Parameter(torch.ones(1)),
    "function": image,
    "type": int,
    "a datetime with a time zone": datetime.datetime.now(datetime.UTC),
    "an array of dtype object": np.array([object()]),
    r"an array of dtype \[": np.zeros(2, [("a", "i4")]),
    "a sparse_coo tensor": torch.eye(2).to_sparse(),
    "a meta tensor": torch.empty(2, device="meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_anything_else_is_refused_by_name(name):
    for x in (NOT_PLAIN[name], [1, (NOT_PLAIN[name],)], {"a": NOT_PLAIN[name]}):
        with pytest.raises(NotPlainError, match=name):
            encode(x)


def test_a_tensor_with_attributes_is_refused():
    x = torch.ones(1)
    x.weight_of = "w"
    with pytest.raises(NotPlainError, match=r"attributes of its own \(weight_of\)"):
        encode(x)


def test_what_comes_twice():
    inner, tensor, text = [1], torch.ones(2), "long text" * 99
    back = decode(encode([inner, inner, tensor, tensor, text, text]))
    assert back[0] is back[1]
    assert back[2] is back[3]
    assert back[4] == back[5] == text
    deep = ()
    for _ in range(DEPTH - 2):
        deep = (deep, deep)  # 2 ** 98 tuples if each were written as often as it comes
    assert len(encode(deep)) < 5000
    for x in ([inner, (inner,)], [{"a": inner}, inner]):
        with pytest.raises(NotPlainError, match="a list is referred to from several levels"):
            encode(x)
    cycle = {}
    cycle["me"] = [cycle]
    with pytest.raises(NotPlainError, match="a dict is referred to"):
        encode(cycle)


def test_depth_is_limited():
    def nest(depth):
        x = 1
        for _ in range(depth):
            x = [x]
        return x

    assert decode(encode(nest(DEPTH - 1))) == nest(DEPTH - 1)
    for depth in (DEPTH, 100_000):
        with pytest.raises(NotPlainError, match=f"more than {DEPTH} deep"):
            encode(nest(depth))
    with pytest.raises(MalformedError):
        decode(MAGIC + b"\x09\x00\x01\x01" * 100_000)


def as_set(x):
    """Return the bytes of a set of what is in a list, which nobody has hashed."""
    data = encode(x)
    data[len(MAGIC)] = 11
    return bytes(data)


def tower(depth):
    """Return a tuple that needs few bytes, and 2 ** depth hashes."""
    made = ()
    for _ in range(depth):
        made = (made, made)
    return made


HOSTILE = {
    "tower": lambda: as_set([tower(60)]),
    "wide": lambda: as_set([tuple([tuple([tuple([None] * 1000)] * 1000)] * 1000)]),
    "one hash": lambda: as_set([k * (2**61 - 1) for k in range(1, 100_000)]),
    "tuples of one hash": lambda: as_set([(k * (2**61 - 1), 1) for k in range(1, 100_000)]),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hashing_is_limited(name):
    with pytest.raises(MalformedError, match="too many"):
        decode(HOSTILE[name]())


def test_what_could_not_be_read_is_not_written():
    same = {k * (2**61 - 1) for k in range(1, 5000)}
    for x in (same, frozenset(same), dict.fromkeys(same), {(k,): 1 for k in same}):
        with pytest.raises(NotPlainError, match="too many keys or entries of sets have one hash"):
            encode([x])
    with pytest.raises(NotPlainError, match="tuples of too many values"):
        encode({tower(24)})


@pytest.mark.parametrize("count", [1, 2])
def test_hashing_keys_is_limited(count, monkeypatch):
    monkeypatch.setattr(hashing, "COLLISIONS", 10**6)
    data = encode([{k * (2**61 - 1): k for k in range(1, 5000)} for _ in range(count)])
    monkeypatch.undo()
    with pytest.raises(MalformedError, match="too many keys or entries of sets have one hash"):
        decode(data)


@pytest.mark.parametrize("x", [
    {2.0**k for k in range(-1074, 1024)}, {tower(12), (tower(12), 1)},
    {(k, (k, "x")): k for k in range(9)}, [{1: k} for k in range(9000)],
    {frozenset({(1, 2)}), frozenset()},
], ids=range(5))  # fmt: skip
def test_hashes_that_are_no_attack(x):
    assert decode(encode(x)) == x


def test_large_counts_take_no_memory():
    for code in range(30):
        for tail in (b"", b"\0", b"\1\x10", b"\0\x10", b"\0\0\x10", b"\0\1\x10"):
            with pytest.raises(MalformedError):
                decode(MAGIC + bytes([code]) + tail + struct.pack("q", 1 << 45) * 3)


def test_bools_are_checked():
    data = encode(torch.tensor([True]))
    data[-1] = 7
    with pytest.raises(MalformedError, match="bools other than"):
        decode(data)


@pytest.mark.parametrize("name", ["repeated", "unique", "zeros", "long"])
def test_many_strings(name):
    chance = random.Random(0)
    texts = {
        "repeated": [chance.choice(("cat", "dog")) for _ in range(5000)],
        "unique": [f"text {i}" for i in range(5000)],
        "zeros": [f"\0{i}\0" for i in range(5000)],
        "long": [str(i) * 50 for i in range(2000)] * 2,
    }[name]
    data = encode(texts)
    assert decode(data) == texts
    assert decode(encode([t.encode() for t in texts])) == [t.encode() for t in texts]
    assert name != "repeated" or len(data) < 5200


def test_numpy_is_not_needed():
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from scaletorch.dist.objects.codec import decode, encode\n"
        "import torch\n"
        "assert decode(encode([1, torch.ones(2)]))[1].tolist() == [1, 1]\n"
        f"try: decode(bytes({list(encode(np.ones(2)))}))\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "numpy" in done.stdout, done.stderr

"""Plain objects as bytes: exact types back, nothing else taken, no bytes that do harm."""

import collections
import contextlib
import dataclasses
import datetime
import enum
import math
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.objects.arrays import DIMS
from scaletorch.dist.objects.beside_pickle import MalformedError, NotPlainError
from scaletorch.dist.objects.named_types import named_types
from scaletorch.dist.objects.plain import MAGIC, decode, encode
from scaletorch.dist.objects.plain_types import make


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
    data = encode(x)
    assert image(decode(data)) == image(x)


def stream(pickled, values=b""):
    """Return what `encode` would have written around this pickle."""
    return MAGIC + struct.pack("<q", len(pickled)) + pickled + values


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
    *(bytes(200_000), bytearray(200_000), "x" * 200_000, "\u00e9" * 300),
    [*range(-5, 300), *range(65500, 65600), 2**31 - 1, 2**31, 0.5, None, True, False, -(2**31)],
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
    data = bytearray(encode(x))
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
    for data in (tail, MAGIC + tail, stream(tail), stream(tail + b".", tail)):
        with contextlib.suppress(MalformedError):
            decode(data)


@pytest.mark.parametrize("x", PLAIN[::7], ids=lambda x: f"{type(x).__name__}")
def test_cut_and_longer_bytes_are_an_error(x):
    data = bytes(encode([x, [1, 2]]))
    for length in range(len(data)):
        with pytest.raises(MalformedError):
            decode(data[:length])
    with pytest.raises(MalformedError, match="more bytes"):
        decode(data + b"\0")
    (length,) = struct.unpack_from("<q", data, 4)
    with pytest.raises(MalformedError, match="more bytes"):
        decode(stream(data[12 : 12 + length] + b"N", data[12 + length :]))


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
    back = decode(encode([inner, [inner], tensor, (tensor,), text, text]))
    assert back[0] is back[1][0]
    assert back[2] is back[3][0]
    assert back[4] == back[5] == text
    deep = ()
    for _ in range(98):
        deep = (deep, deep)  # 2 ** 98 tuples if each were written as often as it comes
    assert len(encode(deep)) < 5000
    cycle = {}
    cycle["me"] = ([cycle],)
    back = decode(encode(cycle))
    assert back["me"][0][0] is back
    inner.append((inner,))
    back = decode(encode(inner[1]))
    assert back[0][1] is back


def nest(depth):
    x = 1
    for _ in range(depth):
        x = [x]
    return x


def test_depth_is_limited():
    assert decode(encode(nest(99))) == nest(99)
    with pytest.raises(RecursionError):
        encode(nest(100_000))


MARK, STOP = pickle.MARK, pickle.STOP
NOTE, GET = pickle.MEMOIZE, pickle.BINGET


def text(value):
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def name(module, attribute):
    return text(module) + text(attribute) + pickle.STACK_GLOBAL


def plain(x):
    """Return the opcodes of builtin types that nobody has hashed."""
    return pickle.dumps(x, 5)[2:-1]


def called(*parts):
    """Return a call of the maker with parts given as opcodes."""
    return name("any", make.__name__) + MARK + b"".join(parts) + pickle.TUPLE + pickle.REDUCE


def as_set(*entries):
    """Return a set of entries given as opcodes."""
    return pickle.EMPTY_SET + MARK + b"".join(entries) + pickle.ADDITEMS


def as_dict(key):
    return pickle.EMPTY_DICT + key + pickle.NONE + pickle.SETITEM


LONG = 10**300_000


@pytest.mark.parametrize("x", [
    {2.0**k for k in range(-1074, 1024)}, {((1,) * 9, "x"), (((),),)},
    {(k, (k, "x")): k for k in range(9)}, [{1: k} for k in range(9000)],
    {frozenset({(1, 2)}), frozenset()}, dict.fromkeys(range(20_000)),
    {(x, y) for x in range(-50, 50) for y in range(-50, 50)},
], ids=range(7))  # fmt: skip
def test_keys_and_entries_of_all_kinds(x):
    assert decode(encode(x)) == x


class Ran(BaseException):
    """What must never be raised."""


def boom(*args):
    raise Ran


TENSOR = called(text("tensor"), called(text("dtype"), text("torch.uint8")), b")", b"\x89")
HUGE = struct.pack("<Q", 1 << 45)
HOSTILE = {
    "eval": name("builtins", "eval") + text("boom()") + pickle.TUPLE1 + pickle.REDUCE,
    "getattr": name("builtins", "getattr"),
    "a dotted name": name("any", "make.__globals__"),
    "a dotted name of ours": name("scaletorch.dist.objects.plain_types", "sys.modules"),
    "GLOBAL": b"cbuiltins\neval\n",
    "GLOBAL of the maker": b"cany\nmake\n",
    "INST": MARK + b"ibuiltins\neval\n",
    "OBJ": MARK + name("any", "make") + pickle.OBJ,
    "NEWOBJ": name("any", "make") + b")" + pickle.NEWOBJ,
    "NEWOBJ_EX": name("any", "make") + b")}" + pickle.NEWOBJ_EX,
    "EXT1": pickle.EXT1 + b"\1", "EXT2": pickle.EXT2 + b"\1\0", "EXT4": pickle.EXT4 + b"\1\0\0\0",
    "PERSID": b"Pid\n", "BINPERSID": b"N" + pickle.BINPERSID,
    "NEXT_BUFFER": pickle.NEXT_BUFFER, "READONLY_BUFFER": b"N" + pickle.READONLY_BUFFER,
    "PUT": b"Np0\n", "GET": b"Ng0\n",
    "INT of many digits": b"I" + b"9" * 5000 + b"\n", "LONG": b"L12L\n", "FLOAT": b"F1.5\n",
    "STRING": b"S'a'\n", "UNICODE": b"Va\n",
    "BUILD of the maker": name("any", "make") + plain((None, {"__defaults__": ()})) + pickle.BUILD,
    "BUILD of a tensor": TENSOR + plain((1, 2, 3, 4)) + pickle.BUILD,
    "APPENDS to a tensor": TENSOR + MARK + b"K\1" + pickle.APPENDS,
    "SETITEM of a tensor": TENSOR + b"K\0K\0" + pickle.SETITEM,
    "SETITEM of a list": b"]K\0K\0" + pickle.SETITEM,
    "SETITEMS of an odd number": b"}" + MARK + b"K\0" + pickle.SETITEMS,
    "ADDITEMS to a tensor": TENSOR + MARK + b"K\0" + pickle.ADDITEMS,
    "a key that does not hash": as_dict(b"]"), "an entry that does not hash": as_set(b"}"),
    "a call of a tensor": TENSOR + b")" + pickle.REDUCE,
    "a call with a list": name("any", "make") + b"]" + pickle.REDUCE,
    "a call with a Size": name("any", "make") + called(text("size"), b")") + pickle.REDUCE,
    "a name that is no text": b"NN" + pickle.STACK_GLOBAL,
    "none": b"", "0 of a mark": MARK,
    "TUPLE2 of one": b"N" + pickle.TUPLE2, "a number never noted": GET + b"\0",
    "a mark never made": pickle.APPENDS, "POP of nothing": pickle.POP,
    "LONG1 cut": pickle.LONG1 + b"\xff", "LONG4 cut": pickle.LONG4 + b"\xff" * 4,
    "LONG4 below 0": pickle.LONG4 + b"\0\0\0\x80",
    "BINUNICODE8": pickle.BINUNICODE8 + HUGE, "BINBYTES8": pickle.BINBYTES8 + HUGE,
    "BYTEARRAY8": pickle.BYTEARRAY8 + HUGE, "BYTEARRAY8 of all": pickle.BYTEARRAY8 + b"\xff" * 8,
    "no UTF-8": pickle.SHORT_BINUNICODE + b"\1\xff", "a long frame": pickle.FRAME + b"\xff" * 8,
    "no kind": called(text("eval"), text("boom()")),
    "a kind of another type": called(b"K\1"), "no parts": called(text("tensor")),
    "parts to spare": called(text("path"), text("a"), text("b")),
    "a tensor of much": called(
        text("tensor"), called(text("dtype"), text("torch.uint8")), plain((1 << 45,)), b"\x89"),
    "a tensor of less than nothing": called(
        text("tensor"), called(text("dtype"), text("torch.uint8")), plain((-1, -1)), b"\x89"),
    "a tensor of many dimensions": called(
        text("tensor"), called(text("dtype"), text("torch.uint8")), plain((0,) * 65), b"\x89"),
    "an array of much": called(text("array"), text("<U999999999"), plain((1,))),
    "an array of objects": called(text("array"), text("|O"), plain((0,))),
    "an array of too much nothing": called(
        text("array"), text("<f8"), plain((0, 1 << 62, 1 << 62))),
    "a number of another size": called(text("number"), text("<f8"), plain(b"a")),
    "a bool of 7": called(text("number"), text("|b1"), plain(b"\7")),
    "no dtype": called(text("dtype"), text("__class__")),
    "no device": called(text("device"), text("x" * 99)),
    "a complex text": called(text("complex"), text("1j"), b"N"),
    "a long range": called(text("range"), plain(0), plain(LONG), plain(1)),
    "a range of steps of 0": called(text("range"), plain(0), plain(1), plain(0)),
    "a date of never": called(text("date"), plain(10**30)),
    "a span of ever": called(text("span"), plain(10**30), plain(0), plain(0)),
    "a time of never": called(text("time"), *map(plain, (1, 13, 1, 0, 0, 0, 0, 0))),
    "a path with a list": called(text("path"), b"]"),
    "a long shape": called(text("size"), plain((1,) * 65)),
    "a shape of text": called(text("size"), plain(("a",))),
    "a type nobody named": called(text("record"), text("builtins.int"), b")"),
    "an enum nobody named": called(text("member"), text("builtins.int"), text("real")),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_opcodes_are_an_error(case, monkeypatch):
    monkeypatch.setattr("builtins.eval", boom)
    data = stream(pickle.PROTO + b"\5" + HOSTILE[case] + STOP)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(data) + 200_000
    finally:
        tracemalloc.stop()


def test_bools_are_checked():
    for x in (torch.tensor([True]), np.array([True])):
        data = bytearray(encode(x))
        data[-1] = 7
        with pytest.raises(MalformedError, match="others than 0 and 1"):
            decode(data)


def test_what_could_not_be_read_is_not_written():
    for x, message in {
        range(LONG): "a range with numbers of more than 1024 bits",
        torch.Size([1] * (DIMS + 1)): "a shape of more than 64 dimensions",
        pickle.PickleBuffer(b"a"): "pickle.PickleBuffer",
        image: "builtins.function",
    }.items():
        with pytest.raises(NotPlainError, match=message):
            encode([x])


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A record that a caller names."""

    number: int
    colour: Colour
    rest: object = None


@dataclasses.dataclass
class Loose:
    """A record that may have further attributes."""

    number: int = 0


class Side(enum.Flag):
    """Flags, of which some have no name of their own."""

    LEFT, RIGHT = 1, 2


def test_types_that_the_caller_names():
    named = named_types([Sample, Colour, Loose, Side])
    sample = Sample(1, Colour.RED, [Loose(2), torch.ones(1), Side.LEFT])
    back = decode(encode([sample, sample], named), named)
    assert (back[0].number, back[0].rest[0]) == (1, Loose(2))
    assert back[0] is back[1]
    assert back[0].colour is Colour.RED
    assert back[0].rest[2] is Side.LEFT
    x = {Sample(1, Colour.RED): 1, Colour.RED: 2}
    assert decode(encode(x, named), named) == x
    with pytest.raises(MalformedError):
        decode(encode(sample, named))


def test_types_that_the_caller_names_are_checked():
    named, loose = named_types([Loose, Side]), Loose()
    loose.extra = 1
    for x, message in (
        (loose, r"Loose with attributes that are no fields \(extra\)"),
        (Side.LEFT | Side.RIGHT, "has no name of its own"),
        (Sample(1, Colour.RED), "Sample"),
    ):
        with pytest.raises(NotPlainError, match=message):
            encode(x, named)
    for kind in (int, Text, 3, dataclasses.make_dataclass("Odd", ["a"], bases=(dict,))):
        with pytest.raises(InvalidArgumentError, match="types"):
            named_types([kind])
    for parts in (plain((1, 2)), b"N", plain(([],))):
        data = stream(called(text("record"), text(f"{__name__}.Loose"), parts) + STOP)
        with contextlib.suppress(MalformedError):
            assert decode(data, named) == Loose([])


@pytest.mark.parametrize("kind", ["repeated", "unique", "zeros", "long"])
def test_many_strings(kind):
    chance = random.Random(0)
    texts = {
        "repeated": [chance.choice(("cat", "dog")) for _ in range(5000)],
        "unique": [f"text {i}" for i in range(5000)],
        "zeros": [f"\0{i}\0" for i in range(5000)],
        "long": [str(i) * 50 for i in range(2000)] * 2,
    }[kind]
    assert_travels(texts)
    assert_travels([text.encode() for text in texts])


def test_numpy_is_not_needed():
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from scaletorch.dist.objects.plain import decode, encode\n"
        "import torch\n"
        "assert decode(encode([1, torch.ones(2)]))[1].tolist() == [1, 1]\n"
        f"try: decode(bytes({list(encode(np.ones(2)))}))\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "numpy" in done.stdout, done.stderr

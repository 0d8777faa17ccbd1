"""Modules that tell their number of heads: a rank's share is split at heads, or refused."""

import copy
import types
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import (
    Divide,
    Fused,
    apply_tensor_parallel,
    gather_tensors,
)

WIDTH, HEADS, HEAD = 16, 4, 4


def attend(q, k, v):
    """Causal attention of [B, L, heads, head] to [B, L, heads * head]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Projections, and how each is split into heads."""

    def __init__(self, split, merge=None, keys=WIDTH, **attributes):
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, keys), nn.Linear(WIDTH, keys)
        self.split, self.merge = split, merge or (lambda module, y: y)
        vars(self).update(attributes)

    def forward(self, x):
        heads = (self.split(self, project(x)) for project in (self.q, self.k, self.v))
        return self.o(self.merge(self, attend(*heads)))


class FusedAttention(Attention):
    def __init__(self, split, **attributes):
        super().__init__(split, **attributes)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        del self.q, self.k, self.v

    def forward(self, x):
        return self.o(attend(*self.split(self, self.qkv(x))))


class Processor(nn.Module):
    """Attention whose code is elsewhere, and whose projections lie deeper."""

    def __init__(self):
        super().__init__()
        self.inner, self.heads = nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH) for n in "qkvo"}), HEADS
        self.processor = lambda module, x: attend(
            *(
                y.view(len(y), -1, module.heads, y.shape[-1] // module.heads)
                for y in (module.inner[name](x) for name in "qkv")
            )
        )

    def forward(self, x):
        return self.inner["o"](self.processor(self, x))


class GroupNormed(Attention):
    def __init__(self):
        super().__init__(by_length, self.normed, head_dim=HEAD)
        self.norm = nn.GroupNorm(HEADS, WIDTH, affine=False)

    def normed(self, module, y):
        return module.norm(y.flatten(0, 1)).view_as(y)


def by_length(module, y):
    return y.view(*y.shape[:-1], -1, HEAD)


def by_count(module, y):
    return y.view(*y.shape[:-1], module.num_heads, -1)


def flat(module, y):
    """The way of fairseq: rows and heads in one dim."""
    y = y.transpose(0, 1).contiguous()
    n, b, _ = y.shape
    y = y.view(n, b * module.num_heads, -1)
    return y.view(n, b, -1, y.shape[-1]).transpose(0, 1)


def in_loop(module, y):
    length = y.shape[-1] // module.num_heads
    return torch.stack([y[..., i : i + length] for i in range(0, y.shape[-1], length)], -2)


PLAN = {"q": "column", "k": "column", "v": "column", "o": "row"}
FUSED = {"qkv": Fused("column", 3), "o": "row"}
DEEP = {f"inner.{name}": style for name, style in PLAN.items()}
CONFIG = types.SimpleNamespace(model={"n_heads": HEADS})


def parts(module, y):
    return y.reshape(*y.shape[:-1], 3, module.heads, -1).unbind(-3)


def chunks(module, y):
    return [part.unflatten(-1, (module.heads, -1)) for part in y.chunk(3, -1)]


# What is refused: how a module is made, its plan, and the number that the message tells.
WRONG = {
    "view": (lambda: Attention(by_count, num_heads=HEADS), PLAN, r"num_heads = 4 is the whole's"),
    "all sizes": (
        lambda: Attention(
            lambda m, y: y.reshape(*y.shape[:2], m.h, y.shape[-1] // m.h), h=HEADS, head_dim=HEAD
        ),
        PLAN,
        r"\.h = 4 is the whole's",
    ),
    "unflatten": (
        lambda: Attention(lambda m, y: y.unflatten(-1, (m.n_head, -1)), n_head=HEADS),
        PLAN,
        r"n_head = 4",
    ),
    "in a config": (
        lambda: Attention(
            lambda m, y: y.unflatten(-1, (m.config.model["n_heads"], -1)), config=CONFIG
        ),
        PLAN,
        r"config\.model\.n_heads = 4",
    ),
    "a literal": (
        lambda: Attention(lambda m, y: y.view(*y.shape[:-1], 4, -1)),
        PLAN,
        "the number 4 that it gives is the whole's",
    ),
    "rows and heads in one dim": (lambda: Attention(flat, num_heads=HEADS), PLAN, "num_heads = 4"),
    "chunks": (
        lambda: Attention(lambda m, y: torch.stack(y.chunk(m.heads, -1), -2), heads=HEADS),
        PLAN,
        "heads = 4",
    ),
    "slices": (lambda: Attention(in_loop, num_heads=HEADS), PLAN, "num_heads = 4"),
    "features first": (
        lambda: Attention(
            lambda m, y: y.mT.reshape(len(y), m.nheads, -1, y.shape[1]).permute(0, 3, 1, 2),
            nheads=HEADS,
        ),
        PLAN,
        "nheads = 4",
    ),
    "grouped": (
        lambda: Attention(
            lambda m, y: y.unflatten(-1, (m.kv_heads, m.groups, -1)).flatten(-3, -2),
            kv_heads=2,
            groups=2,
        ),
        PLAN,
        "the number 2 that it gives is the whole's|kv_heads = 2",
    ),
    "behind the heads": (
        lambda: Attention(
            by_length,
            lambda m, y: F.layer_norm(
                y.unflatten(-1, (m.num_heads, -1)), (y.shape[-1] // m.num_heads,)
            ).flatten(-2),
            num_heads=HEADS,
        ),
        PLAN,
        "of a row-parallel layer into 4 x",
    ),
    "parts": (lambda: FusedAttention(parts, heads=HEADS), FUSED, "heads = 4"),
    "chunks of parts": (lambda: FusedAttention(chunks, heads=HEADS), FUSED, "heads = 4"),
    "elsewhere": (Processor, DEEP, r"'' \(Processor\)|heads = 4"),
    "group norm": (GroupNormed, PLAN, "num_groups = 4"),
}

# What is right: how a module is made and its plan.
RIGHT = {
    "length": (lambda: Attention(by_length, num_heads=HEADS), PLAN),
    "literal length": (lambda: Attention(by_length), PLAN),
    "number of the shape": (
        lambda: Attention(
            lambda m, y: y.view(*y.shape[:-1], y.shape[-1] // m.head_dim, -1), head_dim=HEAD
        ),
        PLAN,
    ),
    "few keys": (lambda: Attention(by_length, keys=2 * HEAD, num_heads=4, num_kv_heads=2), PLAN),
    "halves of a head": (
        lambda: Attention(
            lambda m, y: torch.cat([*by_length(m, y).chunk(2, -1)][::-1], -1), num_heads=HEADS
        ),
        PLAN,
    ),
    "divided": (
        lambda: Attention(by_count, num_heads=HEADS),
        {**PLAN, "": Divide("num_heads")},
    ),
    "divided parts": (
        lambda: FusedAttention(parts, heads=HEADS),
        {**FUSED, "": Divide("heads")},
    ),
    "divided chunks": (
        lambda: FusedAttention(chunks, heads=HEADS),
        {**FUSED, "": Divide("heads")},
    ),
    "divided group norm": (GroupNormed, {**PLAN, "norm": Divide("num_groups")}),
}


class Model(nn.Module):
    """Attention where sequences are whole, behind a root that learns how long they are."""

    def __init__(self, attention):
        super().__init__()
        self.words, self.attention, self.head = nn.Embedding(7, WIDTH), attention, nn.Identity()

    def forward(self, ids):
        return self.attention(self.words(ids))


def run(make, plan, **options):
    torch.manual_seed(0)
    one = Model(make()).double()
    ids = torch.randint(7, (3, 8), generator=torch.Generator().manual_seed(1))
    plan = {f"attention.{name}".rstrip("."): style for name, style in plan.items()}
    many = apply_tensor_parallel(copy.deepcopy(one), plan, dist.group.WORLD, **options)
    sizes = [8 // dist.get_world_size()] * dist.get_world_size()
    out, whole = many(ids), one(ids)
    if options:
        whole = whole.split(sizes, 1)[dist.get_rank()]
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-12)
    one(ids).square().mean().backward()
    (out.square().sum() / one(ids).numel()).backward()
    gradients = gather_tensors(many, {n: p.grad for n, p in many.named_parameters()})
    for name, parameter in one.named_parameters():
        if not (options and name == "words.weight"):
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)
    many(ids)  # and nothing is looked at again


def cases():
    warnings.simplefilter("error")
    for options in ({}, {"sequence_parallel": True}):
        for name, (make, plan, text) in WRONG.items():
            try:
                with pytest.raises(InvalidArgumentError, match=text) as caught:
                    run(make, plan, **options)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            assert "Divide(" in str(caught.value), name
        for name, (make, plan) in RIGHT.items():
            try:
                run(make, plan, **options)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("size", [2, 4])
def test_a_head_keeps_its_length_or_the_number_is_refused(size):
    run_ranks(cases, size)


def sharded(model):
    plan = {f"attention.{name}": style for name, style in PLAN.items()}
    return apply_tensor_parallel(model, plan, dist.group.WORLD)


def unknown():
    many = sharded(Model(Attention(lambda m, y: y.view(*y.shape[:-1], 4, y.shape[-1] // 4))))
    with pytest.warns(RuntimeWarning, match=r"'attention' \(Attention\) splits .* not checked"):
        many(torch.zeros(1, 4, dtype=torch.long))
    replaced = Model(Attention(by_length))
    replaced.attention.forward = lambda x: x
    with pytest.warns(RuntimeWarning, match="was not checked: its forward was replaced"):
        sharded(replaced)


def test_what_cannot_be_told_is_warned_of():
    run_ranks(unknown, 2)


def within_compiled_code():
    model = apply_tensor_parallel(
        nn.Sequential(Attention(by_count, num_heads=HEADS)).double(),
        {f"0.{name}": style for name, style in PLAN.items()},
        dist.group.WORLD,
    )
    x = torch.ones(2, 3, WIDTH, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="'0' runs compiled, so it was not checked whether"):
        torch.compile(model, backend="eager")(x)
    model = copy.deepcopy(nn.Sequential(Attention(by_count, num_heads=HEADS)).double())
    plan = {f"0.{name}": style for name, style in PLAN.items()}
    model = apply_tensor_parallel(model, plan, dist.group.WORLD)
    model[0].compile(backend="eager")
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(InvalidArgumentError, match="num_heads = 4 is the whole's"),
    ):
        model(x)


def test_compiled_code_is_looked_at_as_it_is_written_or_named():
    run_ranks(within_compiled_code, 2, timeout=200)

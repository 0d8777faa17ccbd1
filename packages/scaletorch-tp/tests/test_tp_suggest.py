"""Plans that one forward suggests: what is divided, what stays whole, and why."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.tensor_parallel import Divide, Fused, apply_tensor_parallel, suggest_plan

IDS = torch.arange(8)[None]
WIDTH, HEADS = 16, 4


class Grouped(nn.Module):
    """Attention of names that nobody knows: two keys for four queries, and a norm of each head."""

    def __init__(self):
        super().__init__()
        self.h, self.kv, self.length = HEADS, HEADS // 2, WIDTH // HEADS
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wkv, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(self.length)

    def forward(self, x):
        q = self.norm(self.wq(x).unflatten(-1, (self.h, self.length)))
        k, v = (y.unflatten(-1, (self.kv, self.length)) for y in self.wkv(x).chunk(2, -1))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """Attention with one projection, whose heads take what is left of its output."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = (y.unflatten(-1, (-1, WIDTH // HEADS)) for y in self.qkv(x).chunk(3, -1))
        q, k, v = (y.transpose(1, 2) for y in heads)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Masked(nn.Module):
    """Attention that counts heads and features, and multiplies scores by a mask of its own."""

    def __init__(self):
        super().__init__()
        self.heads, self.split = HEADS, WIDTH
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, x):
        parts = (y.unflatten(-1, (self.heads, -1)) for y in self.qkv(x).split(self.split, -1))
        q, k, v = (y.transpose(1, 2) for y in parts)
        mask = self.mask[: x.shape[1], : x.shape[1]]
        scores = q @ k.transpose(2, 3) * mask - 1e4 * (1 - mask)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 48, bias=False), nn.Linear(24, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between):
        super().__init__()
        self.up, self.between, self.down = nn.Linear(WIDTH, 32), between, nn.Linear(32, WIDTH)
        self.scale = nn.Parameter(torch.rand(32))
        self.register_buffer("slopes", torch.rand(32))

    def forward(self, x):
        return self.down(self.between(self, self.up(x)))


class Block(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.norms = nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in parts))

    def forward(self, x):
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


class Words(nn.Module):
    def __init__(self, *kinds, tied=False, by_function=False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.blocks = nn.ModuleList(Block(*(kind() for kind in kinds)) for _ in range(2))
        self.by_function = by_function
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.table.weight) if self.by_function else self.head(x)


HEAD = {"table": "vocab", "head": "column_gather"}
GATED = {"gate_up": Fused("column", 2), "down": "row"}


class Written(nn.Module):
    """One that writes into what its rows return."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Gated(), Gated()

    def forward(self, x):
        y = self.first(x)
        y += self.second(x)
        return y


PLANS = {
    "grouped": (
        Grouped,
        {"wq": "column", "wkv": Fused("column", 2), "wo": "row", "": Divide("h", "kv")},
    ),
    "packed": (Packed, {"qkv": Fused("column", 3), "out": "row", "": "sharded"}),
    "masked": (Masked, {"qkv": Fused("column", 3), "out": "row", "": Divide("heads", "split")}),
    "gated": (Gated, GATED),
    "written": (Written, {f"{m}.{n}": s for m in ("first", "second") for n, s in GATED.items()}),
}
# What mixes features, or knows how many there are or which: all but the last two stay whole.
MIXED = {
    "a scale of each feature": lambda m, y: F.gelu(y) * m.scale,
    "their number": lambda m, y: F.gelu(y) / y.shape[-1] ** 0.5,
    "softmax": lambda m, y: y.softmax(-1),
    "norm": lambda m, y: F.rms_norm(y, (y.shape[-1],)),
    "cumsum": lambda m, y: y.cumsum(-1),
    "flip": lambda m, y: y.flip(-1),
    "the largest": lambda m, y: y * (y >= y.topk(4, -1).values[..., -1:]),
    "a sign": lambda m, y: y * y.mean(-1, keepdim=True).sign(),
    "a limit": lambda m, y: y.clamp(max=y.max().item() / 2),
    "the place of the largest": lambda m, y: y * (1 + y.argmax(-1, keepdim=True) / 32),
    "a count": lambda m, y: y * (y > 0).sum(-1, keepdim=True),
    "no NaN": lambda m, y: y * (1 + y.nan_to_num().sum(-1, keepdim=True)),
    "the first of a buffer": lambda m, y: y * m.slopes[: y.shape[-1]],
    "places": lambda m, y: y * torch.linspace(0, 1, y.shape[-1], dtype=y.dtype),
    "heads": lambda m, y: y.unflatten(-1, (4, -1)).softmax(-1).flatten(-2),
    "even and odd": lambda m, y: torch.cat([y[..., ::2], y[..., 1::2]], -1),
    "pairs": lambda m, y: y.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    "one number": lambda m, y: F.gelu(y) * m.scale[0].detach(),
}
ALONE = ("pairs", "one number")


EXAMPLES = {"5 tokens": IDS[:, :5], "8 tokens": IDS, "equal tokens": torch.zeros_like(IDS)}


@pytest.mark.parametrize("example", EXAMPLES)  # kernels for short ones take NaN for what is masked
@pytest.mark.parametrize("name", PLANS)
def test_layers_that_fit_together_are_divided(name, example):
    kind, styles = PLANS[name]
    ids = EXAMPLES[example]
    plan = {f"blocks.*.parts.*.{n}".strip("."): s for n, s in styles.items()} | HEAD
    with torch.device("meta"):
        hollow = Words(kind)
    assert suggest_plan(Words(kind).double(), ids) == plan
    assert suggest_plan(hollow, ids) == plan


class Distilled(nn.Module):
    """A student and its teacher, which has a vocabulary of its own and the same plan."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = Words(Gated), Words(Gated).requires_grad_(False)

    def forward(self, ids):
        with torch.no_grad():
            taught = self.teacher(ids)
        return self.student(ids) + taught


def test_a_teacher_is_divided_as_its_student():
    """So that an average of the student's shards goes into the teacher's."""
    found = suggest_plan(Distilled(), IDS)
    plans = [
        {n.removeprefix(f"{of}."): style for n, style in found.items() if n.startswith(of)}
        for of in ("student", "teacher")
    ]
    assert plans[0] == plans[1] == {f"blocks.*.parts.*.{n}": s for n, s in GATED.items()} | HEAD


class Backwards(Words):
    """One that calls its layers from the last to the first, and returns a number, too."""

    def forward(self, ids):
        x = self.table(ids)
        for block in reversed(self.blocks):
            x = block(x)
        return {"logits": self.head(x), "mean": x.mean()}


def test_layers_may_be_called_in_another_order():
    plan = {f"blocks.*.parts.*.{name}": style for name, style in GATED.items()}
    assert suggest_plan(Backwards(Gated), IDS) == plan | HEAD


def test_numbers_that_tell_layers_apart_stay_in_patterns():
    found = suggest_plan(Words(lambda: nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))), IDS)
    assert found == {"blocks.*.parts.0.0": "column", "blocks.*.parts.0.1": "row"} | HEAD


@pytest.mark.parametrize("name", MIXED)
def test_features_that_are_mixed_stay_whole(name):
    plan = {"blocks.*.parts.*.up": "column", "blocks.*.parts.*.down": "row"} | HEAD
    assert suggest_plan(Words(lambda: Between(MIXED[name])), IDS) == (plan if name in ALONE else {})


class Late(Words):
    """One that calls its head in training alone."""

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.training else x


class Spare(Gated):
    """One with a pair that it never calls."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Sequential(nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH))


def test_what_is_not_called_stays_whole():
    plan = {f"blocks.*.parts.*.{name}": style for name, style in GATED.items()}
    assert suggest_plan(Words(Spare), IDS) == plan | HEAD
    assert suggest_plan(Late(Gated), IDS) == plan


def test_tables_that_others_read_stay_whole():
    kind, _ = PLANS["gated"]
    assert HEAD.items() <= suggest_plan(Words(kind, tied=True), IDS).items()
    assert "table" not in suggest_plan(Words(kind, by_function=True), IDS)


def test_layers_as_wide_as_the_vocabulary_are_no_heads():
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), Gated(), nn.Linear(WIDTH, WIDTH))
    plan = {f"*.{name}": style for name, style in GATED.items()}
    assert suggest_plan(model, IDS) == plan | {"0": "vocab", "2": "column_gather"}


class Counting(Gated):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.last = x.shape
        self.seen += 1
        if x.isnan().any():
            raise ValueError("NaN")
        return super().forward(x) * (1 + random.random())


def test_a_model_is_left_as_it_was():
    model = Words(Grouped, Counting).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator, numbers = torch.get_rng_state(), random.getstate()
    assert "blocks.*.parts.*.wo" in suggest_plan(model, {"ids": IDS})
    counting = [module for module in model.modules() if isinstance(module, Counting)]
    assert all(m.calls == 0 and not hasattr(m, "last") for m in counting)
    assert random.getstate() == numbers
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    hooks = (m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(hooks)


def outputs(tp_size):
    manager = setup_process_group_manager(tp_size=tp_size)
    found = {}
    for name, (kind, _) in PLANS.items():
        model = apply_tensor_parallel(Words(kind, Gated).double(), group=manager.tp_group)
        found[name] = model(IDS), sum(p.numel() for p in model.parameters())
    destroy_process_group_manager()
    return found


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_model_without_a_plan_is_divided_by_the_suggested_one(tp_size):
    for found in run_ranks(outputs, tp_size, tp_size):
        for name, (kind, _) in PLANS.items():
            model, (output, parameters) = Words(kind, Gated).double(), found[name]
            torch.testing.assert_close(output, model(IDS))
            assert parameters < sum(p.numel() for p in model.parameters())


def test_a_model_that_takes_no_ids_is_refused():
    words = r"plan=suggest_plan\(model, example\).*; a forward of guessed inputs raised RuntimeErr"
    with pytest.raises(InvalidArgumentError, match=words):
        apply_tensor_parallel(Gated())


class Turned(Packed):
    """Turns queries and keys by complex numbers, which `double()` leaves in their own dtype."""

    def __init__(self):
        super().__init__()
        angles = torch.arange(len(IDS[0])).double()[:, None] * torch.ones(WIDTH // HEADS // 2)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x):
        heads = (y.unflatten(-1, (-1, WIDTH // HEADS)) for y in self.qkv(x).chunk(3, -1))
        q, k, v = (y.transpose(1, 2) for y in heads)
        q, k = (torch.view_as_complex(y.unflatten(-1, (-1, 2))) * self.turns for y in (q, k))
        q, k = (torch.view_as_real(y).flatten(-2) for y in (q, k))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_model_of_float64_and_complex_numbers_is_tried_in_its_own_dtypes():
    plan = suggest_plan(Words(Turned).double(), IDS)
    assert {name.split(".")[-1]: style for name, style in plan.items()}["out"] == "row"

"""torch's attention and encoder layers, of whose heads each rank has its share."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import group

from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import distributed_test, relative_error
from scaletorch.parallel.tensor_parallel import (
    apply_tensor_parallel,
    explain,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
)
from scaletorch.parallel.tensor_parallel.building import find_cuts

SIZE, HEADS, ROWS, LENGTH, KEYS = 16, 4, 3, 5, 7
CAUSAL = {"attn_mask": torch.ones(LENGTH, LENGTH).triu(1).bool(), "is_causal": True}
WEIGHED = {"need_weights": False}
MASK = torch.arange(KEYS) >= torch.tensor([[7], [4], [2]])
PLAN = {"attention": "attention"}
ADDED = {"key_padding_mask": MASK.double() * -1e9}


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


CASES = {  # of the module, whether it attends to itself, and of the call
    "weights": ({}, True, {}),
    "no weights": ({}, True, WEIGHED),
    "sequence first": ({"batch_first": False}, True, {}),
    "one sequence": ({}, True, {}),
    "no biases": ({"bias": False}, True, WEIGHED),
    "causal": ({}, True, CAUSAL),
    "causal, no weights": ({}, True, CAUSAL | WEIGHED),
    "mask": ({}, True, {"attn_mask": drawn(LENGTH, LENGTH)}),
    "mask of each head": ({}, True, {"attn_mask": drawn(ROWS * HEADS, LENGTH, LENGTH)} | WEIGHED),
    "padding": ({}, False, {"key_padding_mask": MASK}),
    "padding and mask": ({}, False, ADDED | {"attn_mask": drawn(LENGTH, KEYS)} | WEIGHED),
    "padding and causal": ({}, True, CAUSAL | WEIGHED | {"key_padding_mask": MASK[:, :LENGTH]}),
}


class Holder(nn.Module):
    """A model around one attention."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        options = {"batch_first": True} | options
        self.attention = nn.MultiheadAttention(SIZE, HEADS, **options)
        self.inputs = nn.ModuleList(  # whose biases of keys would have no gradient
            nn.Linear(SIZE, options.get(name, SIZE), bias=False) for name in ("", "kdim", "vdim")
        )
        for parameter in self.parameters():  # biases are zeros in a new one
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x, y, itself, **asked):
        x, y = self.inputs[0](x), y if itself else [layer(y) for layer in self.inputs[1:]]
        return self.attention(x, *((x, x) if itself else y), **asked)


def shaped(x, name):
    return x.transpose(0, 1) if "sequence first" in name else x[0] if "one" in name else x


def step(model, name):
    _, itself, asked = CASES[name]
    x, y = (shaped(drawn(ROWS, n, SIZE), name) for n in (LENGTH, KEYS))
    out, _ = model(x, y, itself, **asked)
    model.zero_grad()
    (out * drawn(*out.shape).cos()).sum().backward()
    return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def require_same(found, expected):
    for own, one in zip(found, expected, strict=True):
        assert own.shape == one.shape
        assert relative_error(own, one) < 1e-12


def trains_as_one(name):
    options, _, _ = CASES[name]
    output, expected = step(Holder(**options).double(), name)
    model = apply_tensor_parallel(Holder(**options).double(), PLAN, group.WORLD)
    for each in (copy.deepcopy(model), model):
        found, gradients = step(each, name)
        assert relative_error(found, output) < 1e-12
        for parameter, whole in gather_tensors(each, gradients).items():
            assert relative_error(whole, expected[parameter]) < 1e-12, (name, parameter)


@distributed_test(world_size=4)
def test_each_rank_has_a_head():
    for name in CASES:
        trains_as_one(name)


@distributed_test(world_size=3)
def test_heads_need_not_divide():
    for name in ("weights", "mask of each head", "padding"):
        trains_as_one(name)
    model = apply_tensor_parallel(Holder(), PLAN, group.WORLD)
    assert model.attention.in_proj_weight.shape[0] == 3 * (8, 4, 4)[group.WORLD.rank()]


def forces(model):
    """Return the slopes of an energy by position, and gradients of what they lose."""
    x = drawn(ROWS, LENGTH, SIZE).requires_grad_()
    (slopes,) = torch.autograd.grad(model(x, x, True)[0].square().sum(), x, create_graph=True)
    slopes.square().sum().backward()
    return slopes, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@distributed_test(world_size=2)
def test_slopes_can_be_trained_as_in_one_process():
    expected, by_name = forces(Holder().double())
    model = apply_tensor_parallel(Holder().double(), PLAN, group.WORLD)
    slopes, gradients = forces(model)
    assert relative_error(slopes, expected) < 1e-12
    for name, whole in gather_tensors(model, gradients).items():
        assert relative_error(whole, by_name[name]) < 1e-12, name


@distributed_test(world_size=2)
def test_state():
    plain, model = Holder(), apply_tensor_parallel(Holder(), PLAN, group.WORLD)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, whole in gather_state_dict(model).items():
        assert whole.equal(plain.state_dict()[name]), name
    other = {name: value + 1 for name, value in plain.state_dict().items()}
    load_full_state_dict(model, other)
    for name, whole in gather_state_dict(model).items():
        assert whole.equal(other[name]), name
    parts = [(range(n, n + 8), range(n + 16, n + 24), range(n + 32, n + 40)) for n in (0, 8)]
    assert find_cuts(model)["attention.in_proj_weight"].cut.ranges == tuple(parts)
    torch.nn.utils.parametrizations.spectral_norm(model.attention, "in_proj_weight")
    with pytest.raises(StateError, match="MultiheadAttention is computed from others"):
        model(torch.ones(1, 2, SIZE), None, True)


@distributed_test(world_size=2)
def test_dropout_is_of_each_ranks_heads():
    torch.manual_seed(1)
    model = apply_tensor_parallel(Holder(dropout=0.5), PLAN, group.WORLD)
    model.attention.out_proj = nn.Identity()
    x = torch.ones(1, 8, SIZE)
    with torch.no_grad():
        out, random = model(x, x, True)[0], torch.rand(3)
        kept = out / model.eval()(x, x, True)[0]  # equal tokens have equal weights
    assert 0.7 < kept.mean() < 1.3
    for common, mine in ((True, random), (False, kept)):
        everyone = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(everyone, mine)
        assert everyone[0].equal(everyone[1]) == common


def encoder(norm_first=False, layers=2):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        SIZE, HEADS, 24, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first)
    model = nn.Sequential(nn.Linear(SIZE, SIZE).double(), layers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@distributed_test(world_size=4)
def test_encoders_need_no_plan_and_take_no_fast_path():
    x = drawn(ROWS, LENGTH, SIZE)
    padding = torch.arange(LENGTH) >= torch.tensor([[5], [3], [1]])
    for norm_first in (True, False):
        plain = encoder(norm_first).eval()
        model = apply_tensor_parallel(encoder(norm_first), None, group.WORLD).eval()
        with torch.no_grad():
            require_same([model(x)], [plain(x)])
            with warnings.catch_warnings(action="ignore"):  # of the plain one's nested tensors
                made = [m[1](m[0](x), src_key_padding_mask=padding) for m in (model, plain)]
            require_same(*([each[~padding]] for each in made))
    mlp = {"1.layers.*.linear1": "column", "1.layers.*.linear2": "row"}
    model = apply_tensor_parallel(encoder(), mlp, group.WORLD).eval()
    with torch.no_grad():
        require_same([model(x)], [plain(x)])


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(SIZE, HEADS, 24, 0.0, batch_first=True)

    def forward(self, x, memory):
        return self.layer(x, memory, tgt_mask=CAUSAL["attn_mask"], tgt_is_causal=True)


@distributed_test(world_size=4)
def test_decoder_layers_need_no_plan():
    torch.manual_seed(0)
    plain = Decoder().double()
    model = apply_tensor_parallel(copy.deepcopy(plain), None, group.WORLD)
    x, memory = drawn(ROWS, LENGTH, SIZE), drawn(ROWS, KEYS, SIZE)
    for each in (plain, model):
        (each(x, memory) * x.cos()).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    for name, whole in gather_tensors(model, gradients).items():
        assert relative_error(whole, plain.get_parameter(name).grad) < 1e-12, name


@distributed_test(world_size=2)
def test_one_sequence_is_shared_out():
    plan = PLAN | {"": "sequence_layer"}
    model = apply_tensor_parallel(Holder(), plan, group.WORLD, sequence_parallel=True)
    with pytest.raises(InvalidArgumentError, match="one tensor as query, key and value"):
        model(torch.ones(1, 2, SIZE), torch.ones(1, 2, SIZE), False)


class Other(nn.MultiheadAttention):
    pass


def of(attention):
    return nn.ModuleDict({"attention": attention})


REFUSED = [
    (of(nn.MultiheadAttention(8, 2)), "attention", 4, "query heads of attention = 2"),
    (of(nn.MultiheadAttention(8, 2, add_bias_kv=True)), "attention", 2, "parameters are ['bias_k'"),
    (of(nn.MultiheadAttention(8, 2, add_zero_attn=True)), "attention", 2, "a key of no token"),
    (of(nn.MultiheadAttention(8, 2, kdim=4)), "attention", 2, "only ['in_proj_bias', 'in_proj_wei"),
    (of(Other(8, 2)), "attention", 2, "it is a Other, not a MultiheadAttention itself"),
    (of(nn.Linear(8, 8)), "attention", 2, "it is a Linear, not a MultiheadAttention"),
    (of(nn.MultiheadAttention(8, 2)), "attention.out_proj", 2, "the style 'attention', which is"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[3])
def test_what_cannot_be_divided_is_refused_by_name(case):
    model, name, tp, words = case
    style = "row" if "." in name else "attention"
    with pytest.raises(InvalidArgumentError, match=re.escape(words)) as error:
        explain(model, tp, {name: style})
    assert name in str(error.value)


def test_shares_of_sequences_are_of_the_second_dim():
    model = of(nn.MultiheadAttention(8, 2))
    with pytest.raises(InvalidArgumentError, match=r"'attention'.* build it with batch_first=True"):
        explain(model, 2, PLAN | {"": "sequence_layer"}, sequence_parallel=True)


class Shouts(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return super()._ff_block(x) + self.linear1(x).sum()


def test_layers_that_compute_otherwise_have_no_plan():
    with pytest.raises(InvalidArgumentError, match="ModuleList has no plan"):
        explain(nn.ModuleList([Shouts(8, 2, 12)]), 2)
    same = type("Named", (nn.TransformerEncoderLayer,), {})
    assert explain(nn.ModuleList([same(8, 2, 12)]), 2).parameters

"""What plans leave whole, such as attention that cannot be cut, and what they cut all the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    apply_tensor_parallel,
    gather_tensors,
)
from scaletorch.parallel.tensor_parallel.plans.own_plans import find_own_plan, stacked_of
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve
from scaletorch.parallel.tensor_parallel.styles import Slices

HIDDEN, WIDTH = 8, 11


class FalconLinear(nn.Linear):
    def forward(self, x):
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias


class Rounded(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.round(), self.bias)


def test_linear_layers_that_compute_otherwise_are_none():
    assert ColumnParallelLinear.takes(FalconLinear(3, 2))
    assert not ColumnParallelLinear.takes(Rounded(3, 2))
    assert not ColumnParallelLinear.takes(nn.Embedding(3, 2))


class Experts(nn.Module):
    def __init__(self, parts, **own):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(3, parts * WIDTH, HIDDEN))
        self.down_proj = nn.Parameter(torch.zeros(3, HIDDEN, WIDTH))
        vars(self).update(own)


STYLES = {"gate_up_proj": "colwise", "down_proj": "rowwise"}


@pytest.mark.parametrize(
    ("parts", "own", "expected"),
    [
        (2, {}, Slices(1, packed=2)),
        (2, {"is_concatenated": False}, Slices(1, unit=2)),
        (1, {}, Slices(1)),
    ],
)
def test_gate_and_up_in_one_stack_are_two_whatever_a_plan_says(parts, own, expected):
    stacked = stacked_of("experts", Experts(parts, **own), STYLES)
    assert stacked.sharded == {"gate_up_proj": expected, "down_proj": Slices(2)}


# Styles of experts and of a router, as versions of transformers have them.
OLD = {"gate_up_proj": "local_rowwise", "down_proj": "local_rowwise"}
NEW = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
VERSIONS = {
    "5.0": ("gather", OLD, {"moe.router": "ep_router"}),
    "5.0, cut along columns": (
        "gather",
        OLD | {"gate_up_proj": "local_colwise"},
        {"moe.router": "colwise_rep"},
    ),
    "5.1": ("moe_tp_experts", NEW, {"moe.router": "ep_router"}),
    "5.17": ("moe_tp_experts", NEW, {}),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_experts_are_cut_alike_whatever_version_s_plan_names_them(version):
    style, own, plan = VERSIONS[version]
    model = nn.ModuleDict({"moe": nn.ModuleDict({"router": Norm(), "experts": Experts(2)})})
    model._tp_plan = plan | {f"moe.experts.{name}": each for name, each in own.items()}
    model._tp_plan |= {"moe.experts": style}
    *routers, match = find_own_plan(model)[0]
    assert all((each.name, each.style) == ("moe.router", "replicate") for each in routers)
    assert match.name == "moe.experts"
    assert match.style.sharded == {"gate_up_proj": Slices(1, packed=2), "down_proj": Slices(2)}


def test_a_plan_that_gives_ranks_whole_experts_is_none_of_tensor_parallelism():
    model = nn.ModuleDict({"moe": nn.ModuleDict({"experts": Experts(2)})})
    model._tp_plan = {f"moe.experts.{name}": "grouped_gemm" for name in STYLES}
    model._tp_plan |= {"moe.experts": "gather", "head": "colwise_rep"}
    assert find_own_plan(model) is None


def test_local_stacks_that_lie_otherwise_are_refused():
    experts = Experts(2)
    experts.gate_up_proj = nn.Parameter(torch.zeros(3, HIDDEN, 2 * WIDTH))
    with pytest.raises(ValueError, match="the style 'local_rowwise', which is none"):
        stacked_of("experts", experts, OLD)


class Norm(nn.Module):
    """Over all features: of a part it would be another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = FalconLinear(HIDDEN, WIDTH).double()
        self.norm = Norm()
        self.down = nn.Linear(WIDTH, HIDDEN).double()

    def forward(self, x):
        return self.down(self.norm(self.up(x).tanh()))


PLAN = {"mlp.up": "column_gather", "mlp.down": "row_split"}


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x)


def step(net):
    x = torch.randn(3, 5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    net(x).square().sum().backward()
    return {name: p.grad for name, p in net.named_parameters()}


def gathered_gradients():
    net = apply_tensor_parallel(Whole(), PLAN, torch.distributed.group.WORLD)
    found = step(net)
    return gather_tensors(net, found)


def test_a_norm_over_all_features_stands_between_layers_that_gather_and_split():
    expected = step(Whole())
    for found in run_ranks(gathered_gradients, 2):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)


class Grouped(nn.Module):
    """Has fewer keys than queries, and gates heads that are as long as many."""

    def __init__(self, keys):
        super().__init__()
        torch.manual_seed(0)
        self.head_dim = 4
        sizes = {"q": 16, "k": keys, "v": keys, "gate": 4}
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(HIDDEN, size).double())
        self.o = nn.Linear(16, HIDDEN).double()

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
        return self.o((y * self.gate(x).unsqueeze(-1)).flatten(2))


GROUPED = {"o": "row", **dict.fromkeys(("q", "k", "v", "gate"), "column")}


def grouped_gradients(keys):
    net = apply_tensor_parallel(Grouped(keys), GROUPED, torch.distributed.group.WORLD)
    return gather_tensors(net, step(net))


def test_a_gate_as_long_as_a_head():
    for keys in (8, 16):
        expected = step(Grouped(keys))
        for found in run_ranks(grouped_gradients, 2, keys):
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


class NormedEmbedding(nn.Embedding):
    def forward(self, ids):
        return F.normalize(super().forward(ids), dim=-1)


class Planned(nn.Module):
    def __init__(self):
        super().__init__()
        self._tp_plan = {
            "embed": "embedding_rowwise", "mlp.up": "colwise", "mlp.down": "rowwise",
        }  # fmt: skip
        self.embed = NormedEmbedding(16, HIDDEN)
        self.mlp = nn.ModuleDict({"up": nn.Linear(HIDDEN, WIDTH), "down": nn.Linear(WIDTH, HIDDEN)})


def test_a_plan_of_transformers_leaves_whole_what_cannot_be_cut():
    found = {m.name: m.style for m in resolve(Planned(), None, 2).matches.values()}
    assert found == {"embed": "replicate", "mlp.up": "column", "mlp.down": "row"}


def test_experts_that_do_nothing_are_refused():
    model = Planned()
    model._tp_plan["mlp.norm"], model.mlp["norm"] = "moe_identity_expert", nn.Identity()
    with pytest.raises(InvalidArgumentError, match="'moe_identity_expert', which is none of"):
        resolve(model, None, 2)

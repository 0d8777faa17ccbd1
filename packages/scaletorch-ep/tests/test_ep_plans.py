"""Plans for experts as versions of transformers have them; no version needs to be installed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scaletorch.dist import InvalidArgumentError
from scaletorch.parallel.expert_parallel.experts import named_experts

STACKED = {
    "layers.*.moe.bank.gate_up_proj": "grouped_gemm",
    "layers.*.moe.bank.down_proj": "grouped_gemm",
}
PLANS = {
    "5.0": STACKED | {"layers.*.moe.bank": "gather", "layers.*.moe.router": "ep_router"},
    "5.1": STACKED | {"layers.*.moe.router": "ep_router"},
    "5.17": STACKED | {"layers.*.moe.router": "ep_router", "layers.*.moe.bank": "moe_tp_experts"},
    "5.24": STACKED | {"layers.*.moe.bank": "ep_dispatch_experts"},
    "shared": STACKED
    | {"layers.*.moe.bank": "moe_tp_experts", "layers.*.moe.shared.up": "colwise"},
    "yet to come": STACKED | {"layers.*.moe": "moe_block", "layers.*.moe.router": "top_k"},
}


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 6, 2))
        self.down_proj = nn.Parameter(torch.zeros(4, 2, 3))

    def forward(self, hidden, top_k_index, top_k_weights):
        return hidden


class Based(nn.Module):
    """A base model whose config has the plan."""

    def __init__(self, plan):
        super().__init__()
        self.config = SimpleNamespace(base_model_ep_plan=plan)
        moe = {"router": nn.Linear(2, 4), "bank": Bank(), "shared": nn.ModuleDict()}
        self.layers = nn.ModuleList([nn.ModuleDict({"moe": nn.ModuleDict(moe)})])

    @property
    def base_model(self):
        return self


@pytest.mark.parametrize("version", PLANS)
def test_experts_are_found_whatever_the_plan_calls_routers_and_modules(version):
    assert [*named_experts(Based(PLANS[version]), None)] == ["layers.0.moe.bank"]
    inner = nn.ModuleDict({"model": Based(PLANS[version])})
    assert [*named_experts(inner, None)] == ["model.layers.0.moe.bank"]


def test_a_plan_that_names_no_experts_is_none():
    model = Based({"layers.*.moe.router": "ep_router", "layers.*.moe.bank": "moe_tp_experts"})
    with pytest.raises(InvalidArgumentError, match="has no plan for experts"):
        named_experts(model, None)
    moe = model.layers[0].moe
    moe["experts"] = moe.pop("bank")
    assert [*named_experts(model, None)] == ["layers.0.moe.experts"]

"""Experts in a list that their block loops over: plain modules on every axis, and no ep."""

import re
from functools import partial

import pytest
import torch
from sweeps import today
from torch import nn
from torch.nn.functional import silu
from training import adamw, grid, in_one_process, tokens, train_and_compare

from scaletorch import compose
from scaletorch.compose.experts import count_experts
from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import distributed_test
from scaletorch.models import Mixture, MixtureConfig
from scaletorch.parallel.pg_manager import (
    Grid,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.verify import verify

CONFIG = MixtureConfig(
    vocab_size=64, hidden_size=16, intermediate_size=8, num_layers=4, num_heads=4, num_kv_heads=2
)
PLAN = {"layers.*.mlp.experts": "experts"}
CUT = {"layers.*.mlp.experts.*.w1": "column", "layers.*.mlp.experts.*.w3": "column",
       "layers.*.mlp.experts.*.w2": "row", "layers.*.mlp.gate": "replicate"}  # fmt: skip


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(CONFIG.hidden_size, 5, bias=False) for _ in range(2))
        self.w2 = nn.Linear(5, CONFIG.hidden_size, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Skipping(nn.Module):
    """Calls experts that have tokens alone; `skew` is added to the first expert's score."""

    def __init__(self, experts, skew):
        super().__init__()
        self.num_experts, self.skew = experts, skew
        self.gate = nn.Linear(CONFIG.hidden_size, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x):
        rows = x.flatten(0, -2)
        logits = self.gate(rows)
        logits = logits + self.skew * (torch.arange(self.num_experts) == 0).to(logits.dtype)
        weights, index = logits.softmax(-1).topk(2)
        out = rows
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if len(token):
                out = out.index_add(0, token, expert(rows[token]) * weights[token, slot, None])
        return out.view_as(x)


def build(skew, experts):
    torch.manual_seed(3)
    model = Mixture(CONFIG)
    for layer in model.layers:
        layer.mlp = Skipping(experts, skew)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.double()


def batch(step):
    found = tokens(100 + step, 8, 12, 40)
    found["labels"][step % 8, 3:] = -100
    return found


def trained(skew, experts, sizes, options, micro_batches, stage):
    batches = [batch(step) for step in range(2)]
    train_and_compare(
        in_one_process(build(skew, experts), batches, adamw),
        partial(build, skew, experts),
        sizes, batches, adamw,
        options=options, micro_batches=micro_batches, stage=stage, bounds={"weights": 1e-9},
    )  # fmt: skip


# How much the first expert is preferred, the grid, options, micro-batches and stage of ZeRO.
CASES = [
    (0.0, {"dp_size": 2}, {"plan": PLAN}, 1, 0),  # which says nothing to one rank of experts
    (60.0, {"dp_size": 2}, {"recompute": True}, 2, 1),
    (0.0, {"dp_size": 2}, {}, 2, 2),
    (60.0, {"cp_size": 2}, {}, 1, 0),
    (0.0, {"pp_size": 2}, {"schedule": "dualpipe_v"}, 4, 0),
    (60.0, {"pp_size": 2}, {"recompute": True}, 2, 0),
    (0.0, {"tp_size": 2}, {"plan": CUT}, 1, 0),
]


@pytest.mark.parametrize(("skew", "sizes", "options", "micro_batches", "stage"), today(CASES, 7))
def test_they_train_as_in_one_process(skew, sizes, options, micro_batches, stage):
    trained(skew, 5, sizes, options, micro_batches, stage)


def chosen(experts):
    """Return the experts that the tokens of each sequence of the first batch choose."""
    model, found = build(0.0, experts), []
    for name, module in model.named_modules():
        if name.split(".")[-2:-1] == ["experts"]:
            module.register_forward_hook(lambda *_, name=name: found[-1].add(name))
    for row in batch(0)["input_ids"]:
        found.append(set())
        model(row[None])
    return found


def test_second_halves_where_replicas_have_called_other_experts():
    """Each micro-batch of a replica is a sequence here, and no two of them choose alike."""
    called = chosen(12)
    assert len({frozenset(each) for each in called}) == len(called)
    sizes, options = {"dp_size": 2, "pp_size": 2}, {"schedule": "zb_h1", "bucket_size": 128}
    trained(0.0, 12, sizes, options, 4, 2)


DIVIDED = [
    ({"dp_size": 2, "ep_size": 2}, {"plan": None}),
    ({"dp_size": 2, "ep_size": 2}, {"plan": PLAN}),
    ({"tp_size": 2, "ep_size": 2}, {"plan": PLAN, "sequence_parallel": True}),
    ({"tp_size": 2, "etp_size": 1}, {"plan": None}),
]
REFUSED = (
    r"the experts of 'layers\.0\.mlp\.experts' are in a list \('layers\.0\.mlp\.experts', a "
    r"ModuleList\), and experts in a list are not divided: stack them in parameters \[4, \.\.\.\]"
)


@distributed_test(world_size=2)
def test_they_are_not_divided_nor_their_choices_counted_in_silence():
    for sizes, options in DIVIDED:
        with grid(sizes) as manager, pytest.raises(InvalidArgumentError, match=REFUSED):
            compose.parallelize(build(0.0, 4), manager, **options, rehearse=False)
    model = build(0.0, 4)
    for layer in model.layers:
        layer.mlp.gate.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    model = compose.parallelize(model, setup_process_group_manager(dp_size=2), rehearse=False)
    with pytest.raises(InvalidArgumentError, match=r"\(ModuleList\) has no forward, and is"):
        compose.count_routing(model, "gate.bias")
    destroy_process_group_manager()


def built():
    return build(0.0, 5).float()


def test_the_proof_has_no_layouts_of_ep_for_them():
    assert count_experts(built(), None) == count_experts(built(), PLAN) == 1
    report = verify(built, layouts=[Grid(dp=2)], dtype="float64", plan=PLAN)
    assert report.passed, report
    report = verify(built, layouts=[Grid(dp=2, ep=2)], plan=PLAN)
    assert not report.passed
    assert re.search(REFUSED.replace("4", "5"), str(report))

"""Experts in a list that their block loops over: plain modules on every axis, and no ep."""

import re
from functools import cache

import pytest
import torch
from looping_blocks import BLOCKS
from sweeps import today
from torch import nn

from scaletorch import compose
from scaletorch.compose.experts import count_experts
from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.models import Mixture, MixtureConfig
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    Grid,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.verify import verify

STEPS, BOUND = 3, 1e-11
CONFIG = MixtureConfig(
    vocab_size=64, hidden_size=16, intermediate_size=8, num_layers=4, num_heads=4, num_kv_heads=2
)
PLAN = {"layers.*.mlp.experts": "experts"}
CUT = {"layers.*.mlp.experts.*.w1": "column", "layers.*.mlp.experts.*.w3": "column",
       "layers.*.mlp.experts.*.w2": "row", "layers.*.mlp.gate": "replicate"}  # fmt: skip


class First(nn.Module):
    """What a layer takes of a block that returns its router's logits, too."""

    def __init__(self, block):
        super().__init__()
        self.moe = block

    def forward(self, x):
        hidden, logits = self.moe(x)
        return hidden + 0.01 * logits.square().mean(-1).view(*hidden.shape[:-1], 1)


def build(kind, skew, experts):
    torch.manual_seed(3)
    model = Mixture(CONFIG)
    for layer in model.layers:
        block = BLOCKS[kind](experts, CONFIG.hidden_size, skew)
        layer.mlp = First(block) if kind == "mixtral" else block
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.double()


def batch(step):
    tokens = torch.randint(40, (8, 13), generator=torch.Generator().manual_seed(100 + step))
    labels = tokens[:, 1:].clone()
    labels[step % 8, 3:] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


@cache
def reference(kind, skew, experts):
    """Losses, norms and gradients of each step and weights at the end, of one process."""
    model = build(kind, skew, experts)
    optimizer, found = adam(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = batch(step)
        logits = model(whole["input_ids"]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, whole["labels"].flatten())
        loss.backward()
        gradients = {
            n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        }
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        found.append((loss.detach(), norm, gradients))
        optimizer.step()
    return found, model.state_dict()


def train(expected, kind, skew, experts, sizes, options, micro_batches, stage):
    steps, weights = expected
    manager = setup_process_group_manager(**sizes)
    try:
        model = compose.parallelize(build(kind, skew, experts), manager, **options, rehearse=False)
        optimizer = adam(model)
        if stage:
            shard_optimizer(optimizer, model, stage=stage)
        for step, (loss, norm, gradients) in enumerate(steps):
            optimizer.zero_grad()
            some = compose.shard_global_batch(batch(step), micro_batches, model=model)
            assert relative_error(compose.train_step(model, some), loss) < BOUND
            found = compose.full_gradients(model)
            for name, gradient in gradients.items():
                nothing = gradient is None or gradient.abs().max() < 1e-12
                if nothing:
                    assert found.get(name) is None or found[name].abs().max() < 1e-12, name
                else:
                    assert relative_error(found[name], gradient) < BOUND, (name, step)
            assert relative_error(compose.global_grad_norm(model), norm) < BOUND
            compose.clip_grad_norm_(model, 0.3)
            optimizer.step()
        state = compose.full_state_dict(model)
        assert state.keys() == weights.keys()
        for name, weight in weights.items():
            assert relative_error(state[name], weight) < 1e-9, name
        compose.check_replicas(model)
    finally:
        destroy_process_group_manager()


# Each with one of the blocks; in some of them one expert gets all tokens.
CASES = [
    ("mixtral", {"dp_size": 2}, {}, 1, 0),
    ("deepseek", {"dp_size": 2}, {"recompute": True}, 2, 1),
    ("skipping", {"dp_size": 2}, {}, 2, 2),
    ("named", {"dp_size": 2}, {"plan": PLAN}, 1, 0),  # which says nothing to one rank of experts
    ("halving", {"cp_size": 2}, {}, 1, 0),
    ("mixtral", {"cp_size": 2}, {"recompute": True}, 1, 0),
    ("deepseek", {"pp_size": 2}, {"recompute": True}, 2, 0),
    ("named", {"pp_size": 2}, {"schedule": "dualpipe_v"}, 4, 0),
    ("deepseek", {"tp_size": 2}, {"plan": CUT}, 1, 0),
    ("skipping", {"tp_size": 2}, {"plan": CUT}, 1, 0),
]


@pytest.mark.parametrize("skew", [0.0, 60.0])
@pytest.mark.parametrize(("kind", "sizes", "options", "micro_batches", "stage"), today(CASES, 2))
def test_they_train_as_in_one_process(kind, skew, sizes, options, micro_batches, stage):
    given = kind, skew, 5, sizes, options, micro_batches, stage
    run_ranks(train, 2, reference(kind, skew, 5), *given, timeout=200)


def chosen(kind, experts):
    """Return the experts that the tokens of each sequence of the first batch choose."""
    model, found = build(kind, 0.0, experts), []
    for name, module in model.named_modules():
        if name.split(".")[-2:-1] == ["experts"]:
            module.register_forward_hook(lambda *_, name=name: found[-1].add(name))
    for row in batch(0)["input_ids"]:
        found.append(set())
        model(row[None])
    return found


def test_second_halves_where_replicas_have_called_other_experts():
    """Each micro-batch of a replica is a sequence here, and no two of them choose alike."""
    called = chosen("skipping", 12)
    assert len({frozenset(each) for each in called}) == len(called)
    sizes, options = {"dp_size": 2, "pp_size": 2}, {"schedule": "zb_h1", "bucket_size": 128}
    given = "skipping", 0.0, 12, sizes, options, 4, 2
    run_ranks(train, 4, reference("skipping", 0.0, 12), *given, timeout=200)


def refused(sizes, options):
    manager = setup_process_group_manager(**sizes)
    try:
        with pytest.raises(InvalidArgumentError, match=REFUSED):
            compose.parallelize(build("skipping", 0.0, 4), manager, **options, rehearse=False)
    finally:
        destroy_process_group_manager()


REFUSED = (
    r"the experts of 'layers\.0\.mlp\.experts' are in a list \('layers\.0\.mlp\.experts', a "
    r"ModuleList\), and experts in a list are not divided: stack them in parameters \[4, \.\.\.\]"
)


@pytest.mark.parametrize("plan", [None, PLAN])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp_size": 2, "ep_size": 2}, {}),
        ({"pp_size": 2, "tp_size": 2, "ep_size": 2}, {"sequence_parallel": True}),
        ({"tp_size": 2, "etp_size": 1}, {}),
    ],
)
def test_they_are_not_divided(sizes, options, plan):
    run_ranks(refused, 4 if "pp_size" in sizes else 2, sizes, {"plan": plan, **options})


def built():
    return build("skipping", 0.0, 5).float()


def test_the_proof_has_no_layouts_of_ep_for_them():
    for plan in (None, PLAN):
        assert count_experts(built(), plan) == 1
        report = verify(built, layouts=[Grid(dp=2)], dtype="float64", plan=plan)
        assert report.passed, report
    report = verify(built, layouts=[Grid(dp=2, ep=2)], plan=PLAN)
    assert not report.passed
    assert re.search(REFUSED.replace("4", "5"), str(report))


def uncounted():
    manager = setup_process_group_manager(dp_size=2)
    try:
        model = build("skipping", 0.0, 4)
        for layer in model.layers:
            layer.mlp.gate.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        model = compose.parallelize(model, manager, rehearse=False)
        with pytest.raises(InvalidArgumentError, match=r"\(ModuleList\) has no forward, and is"):
            compose.count_routing(model, "gate.bias")
    finally:
        destroy_process_group_manager()


def test_choices_of_lists_are_not_counted_in_silence():
    run_ranks(uncounted, 2)

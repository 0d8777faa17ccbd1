"""Blocks that loop over a bare list of experts train as in one process, on every layout."""

from functools import cache

import pytest
import torch
from looping_blocks import BLOCKS
from torch import nn

from scaletorch import compose
from scaletorch.checkpoint import load, save
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
        plan = {pattern.replace("mlp.", "mlp.moe.") if kind == "mixtral" else pattern: style
                for pattern, style in (PLAN | options.pop("plan", {})).items()}  # fmt: skip
        model = compose.parallelize(build(kind, skew, experts), manager, plan=plan, **options)
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
            if not name.endswith("load"):
                assert relative_error(state[name], weight) < 1e-9, name
        compose.check_replicas(model)
    finally:
        destroy_process_group_manager()


LAYOUTS = [
    ({"dp_size": 2, "ep_size": 2}, {}, 1, 0),
    ({"dp_size": 4, "ep_size": 4}, {"recompute": True}, 2, 1),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, {"recompute": True}, 1, 0),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, {}, 2, 2),
    ({"dp_size": 2, "cp_size": 2, "ep_size": 4}, {}, 1, 0),
    ({"dp_size": 2, "pp_size": 2, "ep_size": 2}, {"recompute": True}, 2, 0),
    ({"dp_size": 2, "pp_size": 2, "ep_size": 2}, {"schedule": "dualpipe_v"}, 4, 0),
    ({"dp_size": 2, "tp_size": 2, "etp_size": 1}, {}, 1, 0),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, {"sequence_parallel": True}, 1, 1),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, {}, 1, 0),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, {"plan": CUT}, 1, 0),
]


# Every layout with two of the blocks; one expert gets all tokens in one of these.
CASES = [
    (kind, number, 60.0 * other)
    for number in range(len(LAYOUTS))
    for other in (0, 1)
    for kind in [[*BLOCKS][(number + other) % len(BLOCKS)]]
]


@pytest.mark.parametrize(("kind", "layout", "skew"), CASES)
def test_layouts(kind, layout, skew):
    sizes, options, micro_batches, stage = LAYOUTS[layout]
    ranks = 2 if sizes == {"dp_size": 2, "ep_size": 2} else 4
    given = kind, skew, 5, sizes, {**options}, micro_batches, stage
    run_ranks(train, ranks, reference(kind, skew, 5), *given, timeout=60)


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
    run_ranks(train, 4, reference("skipping", 0.0, 12), *given, timeout=60)


def built():
    return build("mixtral", 0.0, 5).float()


def test_the_proof_takes_lists():
    plan = {"layers.*.mlp.moe.experts": "experts"}
    report = verify(built, layouts=[Grid(dp=2, ep=2), Grid(tp=2, ep=2)], plan=plan, dtype="float64")
    assert report.passed, report


def refused(options):
    manager = setup_process_group_manager(dp_size=2, tp_size=2, ep_size=2, etp_size=2)
    try:
        with pytest.raises(InvalidArgumentError, match="take etp_size=1, or no sequence_parallel"):
            compose.parallelize(build("skipping", 0.0, 4), manager, plan=PLAN, **options)
    finally:
        destroy_process_group_manager()


def test_lists_in_common_of_tp_ranks_with_tokens_of_their_own_are_refused():
    run_ranks(refused, 4, {"sequence_parallel": True})


def uncounted():
    manager = setup_process_group_manager(dp_size=2, ep_size=2)
    try:
        model = build("skipping", 0.0, 4)
        for layer in model.layers:
            layer.mlp.gate.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        model = compose.parallelize(model, manager, plan=PLAN)
        with pytest.raises(InvalidArgumentError, match="is a list that its block loops over, and"):
            compose.count_routing(model, "gate.bias")
    finally:
        destroy_process_group_manager()


def test_choices_of_lists_are_not_counted_in_silence():
    run_ranks(uncounted, 2)


def step(model, optimizer, number):
    compose.train_step(model, compose.shard_global_batch(batch(number), 1, model=model))
    optimizer.step()
    optimizer.zero_grad()
    return compose.full_state_dict(model)


def saved(folder, kind, sizes):
    manager = setup_process_group_manager(**sizes)
    try:
        model = compose.parallelize(build(kind, 0.0, 5), manager, plan=PLAN)
        optimizer = shard_optimizer(adam(model), model)
        before = step(model, optimizer, 0)
        save(folder, model, optimizer, step=1)
        return before, step(model, optimizer, 1)
    finally:
        destroy_process_group_manager()


def loaded(folder, kind, sizes):
    manager = setup_process_group_manager(**sizes)
    try:
        model = compose.parallelize(build(kind, 0.0, 5), manager, plan=PLAN)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)  # so that what is not loaded shows
        optimizer = adam(model)
        if manager.cp_dp_size > 1:
            shard_optimizer(optimizer, model, stage=2)
        load(folder, model, optimizer)
        return compose.full_state_dict(model), step(model, optimizer, 1)
    finally:
        destroy_process_group_manager()


@pytest.mark.parametrize("kind", ["deepseek", "named"])
def test_checkpoints_move_between_layouts(kind, tmp_path):
    folder = tmp_path / "one"
    before, then = run_ranks(saved, 4, folder, kind, {"dp_size": 4, "ep_size": 4})[0]
    for ranks, sizes in (
        (1, {}),
        (2, {"dp_size": 2, "ep_size": 2}),
        (4, {"tp_size": 2, "dp_size": 2, "ep_size": 2}),
    ):
        after, later = run_ranks(loaded, ranks, folder, kind, sizes)[0]
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], each) for name, each in before.items())
        assert max(relative_error(later[name], each) for name, each in then.items()) < BOUND

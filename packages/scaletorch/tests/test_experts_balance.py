"""Balance of experts on every layout: the routers' own loss, and biases that move without one."""

from functools import cache

import pytest
import torch
from sweeps import today
from torch import nn
from training import grid

from scaletorch import compose
from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks

transformers = pytest.importorskip("transformers")

from test_experts import BOUND, STEPS, batch, build  # noqa: E402

BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.7}


def balanced_batch(kind):
    """A whole batch; one of a length that 2 cp ranks fill up; one that is padded already."""
    whole = batch(0)
    if kind == "odd":
        return {name: entry[:, :10] for name, entry in whole.items()}
    if kind == "padded":
        return {**whole, "attention_mask": torch.ones(8, 12).long().tril(6).flip(0)}
    return whole


def balanced_reference(family, whole):
    """The loss with the routers' own, written out, and its gradients; of one process."""
    model = build(family, **BALANCE)
    output = model(**{name: entry for name, entry in whole.items() if name != "labels"})
    mask = whole.get("attention_mask", torch.ones_like(whole["labels"])).flatten().bool()
    scores = torch.cat([each[mask] for each in output.router_logits]).softmax(-1)
    chosen = nn.functional.one_hot(scores.topk(2).indices, scores.shape[-1]).sum((0, 1)).double()
    balance = scores.shape[-1] * (chosen / len(scores) * scores.mean(0)).sum()
    loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), whole["labels"].flatten())
    assert relative_error(balance, output.aux_loss) < 1e-6  # which is computed in float32
    (loss + 0.7 * balance).backward()
    return loss + 0.7 * balance, {n: p.grad for n, p in model.named_parameters()}


def balanced(family, sizes, options, kind):
    with grid(sizes) as manager:
        whole = balanced_batch(kind)
        expected, gradients = balanced_reference(family, whole)
        model = compose.parallelize(build(family, **BALANCE), manager, **options, rehearse=False)
        loss = compose.train_step(model, compose.shard_global_batch(whole, 1, model=model))
        assert relative_error(loss, expected) < BOUND
        found = compose.full_gradients(model)
        for name, gradient in gradients.items():
            assert relative_error(found[name], gradient) < BOUND, name
        with pytest.raises(InvalidArgumentError, match="which 2 micro-batches cannot compute"):
            compose.train_step(model, compose.shard_global_batch(whole, 2, model=model))


BALANCED = [
    ({"dp_size": 4, "ep_size": 2}, {"recompute": True}, "padded"),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, {"sequence_parallel": True}, "whole"),
    ({"cp_size": 2, "tp_size": 2, "ep_size": 2}, {"sequence_parallel": True}, "odd"),
    ({"cp_size": 2, "tp_size": 2, "ep_size": 2}, {}, "whole"),
]


@pytest.mark.parametrize(
    ("sizes", "options", "kind"),
    today(BALANCED, 4),
)
def test_the_routers_own_loss_is_of_the_tokens_of_the_global_batch(sizes, options, kind):
    run_ranks(balanced, 4, "Qwen3Moe", sizes, options, kind, timeout=200)


RATE, SHARED = 0.05, {"sequence_parallel": True}


@cache
def moved(length):
    """Losses, counts and biases of each step in one process, written out."""
    model = build("Glm4Moe")
    block = model.model.layers[1].mlp
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen, found = [], []
    block.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = {name: entry[:, :length] for name, entry in batch(step).items()}
        logits = model(whole["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten())
        loss.backward()
        optimizer.step()
        counts = nn.functional.one_hot(chosen.pop(), 8).sum((0, 1))
        bias = block.gate.e_score_correction_bias
        bias += RATE * torch.sign(counts.double().mean() - counts)
        found.append((loss.detach(), tuple(counts.tolist()), bias.clone()))
    return found


def move(expected, length, sizes, options, micro_batches):
    with grid(sizes) as manager:
        model = compose.parallelize(build("Glm4Moe"), manager, **options, rehearse=False)
        counts = compose.count_routing(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, (loss, tokens, bias) in enumerate(expected):
            optimizer.zero_grad()
            whole = {name: entry[:, :length] for name, entry in batch(step).items()}
            some = compose.shard_global_batch(whole, micro_batches, model=model)
            assert relative_error(compose.train_step(model, some), loss) < BOUND
            optimizer.step()
            statistics = compose.move_biases(model, counts, RATE)
            assert all(not count.any() for count in counts.values())
            state = model.state_dict()
            for name, told in statistics.items():
                assert told.tokens == tokens
                assert relative_error(state[name], bias) < BOUND
    return list(statistics)


MOVED = [
    ({"dp_size": 4, "ep_size": 4}, {"recompute": True}, 2, 12),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, SHARED, 1, 12),
    ({"cp_size": 2, "tp_size": 2, "ep_size": 2}, SHARED, 2, 10),
    ({"dp_size": 2, "pp_size": 2, "ep_size": 2}, {"schedule": "zb_h1"}, 4, 12),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, SHARED, 1, 12),
]


@pytest.mark.parametrize(
    ("sizes", "options", "micro_batches", "length"),
    today(MOVED, 5),
)
def test_biases_move_as_in_one_process(sizes, options, micro_batches, length):
    given = moved(length), length, sizes, options, micro_batches
    names = run_ranks(move, 4, *given, timeout=200)
    seen = {name for each in names for name in each}
    assert seen == {"model.layers.1.mlp.gate.e_score_correction_bias"}


@distributed_test(world_size=2)
def test_a_model_without_such_biases_is_refused():
    with grid(dp_size=2) as manager:
        model = compose.parallelize(build("Mixtral"), manager, rehearse=False)
        with pytest.raises(InvalidArgumentError, match=r"has a bias 'gate\.e_score"):
            compose.count_routing(model)

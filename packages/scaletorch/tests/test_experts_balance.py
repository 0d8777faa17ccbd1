"""Balance of experts on every layout: biases that move without a loss."""

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

"""Experts in stacks: where a pipeline is cut, which ones are refused, gradients not finite."""

from functools import partial

import pytest
import torch
from small_models import small_mixture
from torch import nn
from training import grid, in_one_process, on_a_layout, require_alike, tokens

from scaletorch import compose
from scaletorch.dist import NonFiniteError, get_rank
from scaletorch.dist.errors import RehearsalError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks
from scaletorch.parallel.pipeline_parallel import Split

WIDTH, VOCABULARY, EXPERTS = 16, 8, 3  # two ranks have two experts and one
BATCH = tokens(5, 4, 6, VOCABULARY)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def one(self, rows, expert):
        return (rows @ self.weight[expert] + self.bias[expert]).tanh()

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            rows = self.one(hidden[token], expert) * weights[token, slot, None]
            out = out.index_add(0, token, rows)
        return out


class Normalising(Experts):
    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, weights / weights.sum(-1, keepdim=True))


class Columns(Experts):
    """Weights of single experts lie in columns, which stay whole and are numbered anew."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, EXPERTS))

    def one(self, rows, expert):
        return super().one(rows, expert) * self.scale[:, expert]


class Routed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), kind()

    def forward(self, x):
        weights, index = self.router(x.flatten(0, 1)).softmax(-1).topk(2)
        return x + self.experts(x.flatten(0, 1), index, weights).view_as(x)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    """By its own experts, one rank would cut behind two layers, the other behind the first."""

    def __init__(self, kind=Experts):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Dense(), Routed(kind), Routed(kind)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@distributed_test(world_size=4)
def test_ranks_with_unequal_shares_of_experts_cut_at_one_place():
    sizes = {"dp_size": 2, "pp_size": 2, "ep_size": 2}
    options = {"split": Split(costs="parameters")}
    found = on_a_layout(Model, sizes, [BATCH], options=options, micro_batches=2)
    require_alike(found, in_one_process(Model(), [BATCH]), losses=1e-12)
    with grid(sizes) as manager:
        model = compose.parallelize(Model(), manager, **options, rehearse=False)
    layers = {n.split(".")[1] for n, _ in model.named_parameters() if n[:6] == "layers"}
    assert layers == ({"0", "1"}, {"2"})[get_rank() % 2]


@distributed_test(world_size=2)
def test_experts_that_need_one_another_are_refused():
    train = partial(on_a_layout, sizes={"dp_size": 2, "ep_size": 2}, batches=[BATCH])
    train(Model, rehearse=True)
    for kind in (Normalising, Columns):
        with pytest.raises(RehearsalError, match=r"output of layers\.1 is off"):
            train(partial(Model, kind), rehearse=True)


CHECKED = {"check_finite": True}


def built():
    torch.manual_seed(2)
    return small_mixture().double()


def refused(sizes, guilty, name):
    with grid(sizes) as manager:
        whole, plain = tokens(rows=8), built()
        logits = plain(whole["input_ids"]).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, whole["labels"].flatten()).backward()
        model = compose.parallelize(built(), manager, data_parallel=CHECKED, rehearse=False)
        some = compose.shard_global_batch(whole, 2, model=model)
        named = {n: p for n, p in model.named_parameters() if n.endswith(name)}
        handles = [p.register_hook(lambda g: g / 0) for p in named.values() if get_rank() == guilty]
        with pytest.raises(NonFiniteError) as caught:
            compose.train_step(model, some)
        assert all(p.grad is None for p in model.parameters())
        for handle in handles:
            handle.remove()
        compose.train_step(model, some)
        found = compose.full_gradients(model)
        for each, parameter in plain.named_parameters():
            assert relative_error(found[each], parameter.grad) < 1e-11, each
        return str(caught.value)


LAYOUTS = [
    ({"dp_size": 4, "ep_size": 2}, 1, "experts.down_proj"),
    ({"dp_size": 2, "pp_size": 2, "ep_size": 2}, 3, "experts.down_proj"),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, 2, "experts.gate_up_proj"),
    ({"tp_size": 2, "pp_size": 2}, 1, "q_proj.weight"),
]


@pytest.mark.parametrize(("sizes", "guilty", "name"), LAYOUTS)
def test_every_rank_hears(sizes, guilty, name):
    texts = run_ranks(refused, 4, sizes, guilty, name)
    assert all(f"{name} on dp" in text and "all are None now" in text for text in texts)
    heard = [text for text in texts if "gradients of other ranks are not finite" in text]
    assert 0 < len(heard) < 4
    assert "gradients of other ranks" not in texts[guilty]

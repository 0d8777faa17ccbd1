"""Sequence parallelism: what a model does with shares of a sequence, and what it is told.

`test_tp_model.py` trains whole models on shares of unequal lengths.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llamas import Llama, as_one_process, make
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, sequence_share


def ids(length):
    return torch.randint(11, (2, length), generator=torch.Generator().manual_seed(length))


def divided(model):
    return apply_tensor_parallel(model, None, dist.group.WORLD, sequence_parallel=True)


class Counting(Llama):
    """Without positions it counts its tokens, as models of transformers do."""

    def __init__(self, hidden=10, **options):
        super().__init__(hidden=hidden, **options)
        self.places = nn.Embedding(16, hidden)

    def forward(self, input_ids, position_ids=None):
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        x = x + self.places(position_ids)
        for layer in self.layers:
            x = self.behind(layer(x))
        return self.lm_head(self.norm(x))

    def behind(self, x):
        return x


@distributed_test(world_size=2)
def test_a_model_is_told_the_positions_that_it_would_count():
    one = make(Counting)
    many = divided(copy.deepcopy(one))
    places = torch.arange(9).expand(2, 9)
    for arguments, options in (
        ((ids(9),), {}),
        ((ids(9), places), {}),
        ((), {"input_ids": ids(9), "position_ids": None}),
    ):
        torch.testing.assert_close(many(*arguments, **options), one(ids(9)), rtol=1e-12, atol=1e-12)


class Listed(Counting):
    """Reads parameters of a list, and of a layer that it does not call, on shares."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(10))])
        self.read = nn.Linear(10, 10, bias=False)

    def behind(self, x):
        return F.linear(x * self.scales[0], self.read.weight)


class Replaced(Counting):
    """A norm's forward, replaced on the instance, reads a parameter of the model."""

    def __init__(self):
        super().__init__()
        self.own_scale = nn.Parameter(torch.randn(10))
        norm = self.layers[0].input_layernorm
        own = norm.forward
        norm.forward = lambda x: own(x) * self.own_scale


@distributed_test(world_size=2)
def test_parameters_that_others_read_are_summed_too():
    as_one_process(make(Listed), sequence_parallel=True)
    one, many = make(Replaced), divided(make(Replaced))
    for model in (one, many):
        model(ids(9)).square().mean().backward()
    gradient = many.own_scale.grad
    torch.testing.assert_close(gradient, one.own_scale.grad, rtol=1e-9, atol=1e-12)


@distributed_test(world_size=3)
def test_hidden_states_are_shares():
    model, lengths = divided(make()), []
    model.norm.register_forward_hook(lambda _m, _i, out: lengths.append(out.shape[1]))
    for length in (12, 7):
        model(ids(length))
        assert sequence_share(model, length) == lengths[-1]
    assert lengths == [4, (3, 2, 2)[dist.get_rank()]]
    with pytest.raises(InvalidArgumentError, match=r"expected this rank's [23] of 7 tokens, got"):
        model.layers[0].mlp(torch.zeros(2, 4, 10, dtype=torch.float64))
    with pytest.raises(InvalidArgumentError, match="a sequence of 2 tokens leaves some of 3 ranks"):
        model(ids(2))


def draws():
    model, inside = divided(make()), []
    norm = model.layers[1].input_layernorm
    norm.register_forward_hook(lambda *_: inside.append(torch.rand(4).tolist()))
    torch.manual_seed(5)
    model(ids(8))
    return inside, torch.rand(1).item()


def test_draws_differ_on_shares_and_the_common_stream_goes_on():
    (one, after), (other, again) = run_ranks(draws, 2)
    assert one != other
    assert after == again


def test_one_rank_changes_nothing():
    model, same = make(), make()
    apply_tensor_parallel(model, None, None, sequence_parallel=True)
    assert type(model) is Llama
    assert sequence_share(model, 5) == 5
    assert torch.equal(model(ids(5)), same(ids(5)))

"""Lists of experts whose blocks cannot be run twice, or not alike: errors on every rank at once."""

import re

import pytest
import torch
import torch.distributed as c10d
from looping_blocks import HIDDEN, Expert, Skipping, asks_well, model_of
from torch import nn

from scaletorch.dist import InvalidArgumentError, MismatchError, StateError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.expert_parallel import apply_expert_parallel

WORLD = c10d.group.WORLD
PLAN = {"block.experts": "experts"}


def _two_lists():
    model = model_of(None)
    model["block"].others = nn.ModuleList(Expert() for _ in range(4))
    return model, {"block.experts": "experts", "block.others": "experts"}


def _held():
    experts = nn.ModuleDict({"experts": model_of(None)["block"].experts})
    return nn.ModuleDict({"block": experts}), PLAN


def _replaced():
    model = model_of(None)
    model["block"].forward = lambda x: x
    return model, PLAN


def _tied_experts():
    model = model_of(None)
    model["block"].experts[3].w1.weight = model["block"].experts[0].w1.weight
    return model, PLAN


def _tied_to_others():
    model = model_of(None)
    model["head"] = nn.Linear(HIDDEN, 5)
    model["head"].weight = model["block"].experts[1].w1.weight
    return model, PLAN


UNFIT = {
    "no block": (
        _held,
        "'block.experts' is a list without a forward of its own, held by a ModuleDict without one",
    ),
    "root": (lambda: (nn.ModuleList([Expert(), Expert()]), {"": "experts"}), "held by no module"),
    "replaced": (_replaced, "the forward of the block around 'block.experts' was replaced"),
    "two lists": (_two_lists, "'block.experts' and 'block.others' are lists of one block"),
    "tied experts": (_tied_experts, "'block.experts.3' shares a parameter with 'block.experts.0'"),
    "tied": (_tied_to_others, "shares a parameter with the rest of the model ('head.weight')"),
}


@pytest.mark.parametrize("case", UNFIT)
@distributed_test(world_size=2)
def test_models_that_do_not_fit_are_as_before(case):
    make, message = UNFIT[case]
    model, plan = make()
    kinds = [type(each) for each in model.modules()]
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        apply_expert_parallel(model, plan, WORLD)
    assert [type(each) for each in model.modules()] == kinds


@distributed_test(world_size=5)
def test_fewer_experts_than_ranks():
    with pytest.raises(InvalidArgumentError, match="has 4 experts, fewer than the 5 ranks"):
        apply_expert_parallel(model_of(None), PLAN, WORLD)


@distributed_test(world_size=2)
def test_divided_twice():
    model = apply_expert_parallel(model_of(None), PLAN, WORLD)
    with pytest.raises(InvalidArgumentError, match="is divided already"):
        apply_expert_parallel(model, PLAN, WORLD)


def _takes_weights(block, x):
    return x @ block.experts[2].w1.weight.T


def _two_arguments(block, x):
    return block.experts[2](x, x)


def _other_widths(block, x):
    return block.experts[0](x).sum() + block.experts[1](x[:, :3]).sum()


def _integers(block, x):
    return block.experts[0](x.long())


def _outside(block, x):
    return block.experts[4](x)


_SEEN = []


def _remembers(block, x):
    _SEEN.append(1)
    return block.experts[0](x * len(_SEEN))


def _goes_elsewhere(block, x):
    _SEEN.append(1)
    return block.experts[len(_SEEN) % 4](x)


def _asks_less(block, x):
    _SEEN.append(1)
    return sum(block.experts[n](x).sum() for n in range(4 - len(_SEEN) % 3))


def _chains(block, x):
    return block.experts[1](block.experts[0](x))


def _writes_behind(block, x):
    given = x * 1
    result = block.experts[0](given)
    return result + given.detach().mul_(2)


def _writes_parameter(block, x):
    with torch.no_grad():
        block.scale.mul_(2)
    return block.experts[0](x) * block.scale


REFUSED = {
    _takes_weights: "takes 'w1' of expert 2, which may be another rank's",
    _two_arguments: "expert 2 of 'block.experts' must be called with one tensor [..., H], got",
    _other_widths: "must be called with rows of one width",
    _integers: "of one dtype of torch.float64, torch.float32",
    _remembers: "the first time it asked expert 0 on (3, 6), the second time expert 0 on (3, 6), "
    "or other values",
    _goes_elsewhere: "what one expert is asked for must not hang on another's result",
    _asks_less: "the second time nothing more",
    _chains: "is run twice, to see what it asks experts for",
    _writes_behind: "writes to what it has called expert 0 with",
    _writes_parameter: "writes to a parameter in its forward",
}


@pytest.mark.parametrize("ask", REFUSED, ids=lambda ask: ask.__name__)
@distributed_test(world_size=3)
def test_a_block_of_one_rank_is_refused_on_all(ask):
    message, rank = REFUSED[ask], c10d.get_rank()
    _SEEN.clear()
    model = apply_expert_parallel(model_of(ask if rank == 1 else asks_well), PLAN, WORLD)
    kind = InvalidArgumentError if rank == 1 else MismatchError
    for _ in range(2):
        with pytest.raises(kind, match=re.escape(message)):
            model["block"](torch.ones(3, HIDDEN))
    model["block"].ask = asks_well
    model["block"](torch.ones(3, HIDDEN)).sum().backward()  # all is as good as before


@distributed_test(world_size=2)
def test_an_expert_that_is_called_alone():
    model = apply_expert_parallel(model_of(asks_well), PLAN, WORLD)
    with pytest.raises(StateError, match=r"an expert \(Expert\) of a divided list was called outs"):
        model["block"].experts[0](torch.ones(3, HIDDEN))


TOLD = r"must return a row of the same|disagree on the experts of(.|\n)*results torch\.bfloat16"


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("result", ["shape", "dtype", "tuple"])
@distributed_test(world_size=2)
def test_experts_that_return_something_else(result, first):
    results = {"shape": lambda x: x[:, :2], "dtype": torch.Tensor.bfloat16, "tuple": lambda x: (x,)}
    model = apply_expert_parallel(model_of(asks_well), PLAN, WORLD)
    if not first:
        model["block"](torch.ones(3, HIDDEN))
    if c10d.get_rank():
        model["block"].experts[-1].forward = results[result]
    with pytest.raises((InvalidArgumentError, MismatchError), match=TOLD):
        model["block"](torch.ones(3, HIDDEN))


@distributed_test(world_size=2)
def test_calls_that_differ():
    model, rank = apply_expert_parallel(model_of(asks_well), PLAN, WORLD), c10d.get_rank()
    with (
        torch.set_grad_enabled(bool(rank)),
        pytest.raises(MismatchError, match=r"disagree on a call of the experts 'block\.experts'"),
    ):
        model["block"](torch.ones(3, HIDDEN))
    model.to(torch.float32 if rank else torch.float64)
    with pytest.raises(MismatchError, match=r"hidden size 6, torch\.float64"):
        model["block"](torch.ones(3, HIDDEN, dtype=torch.float32 if rank else torch.float64))


@distributed_test(world_size=2)
def test_tp_ranks_that_ask_otherwise():
    def ask(block, x):
        return block.experts[c10d.get_rank()](x)

    model = apply_expert_parallel(model_of(ask), PLAN, WORLD, tp_group=WORLD)
    with pytest.raises(MismatchError, match=r"what is asked of 'block\.experts', the same on"):
        model["block"](torch.ones(3, HIDDEN))


@distributed_test(world_size=2)
def test_a_list_needs_a_plan_that_names_it():
    block = Skipping(4)
    with pytest.raises(InvalidArgumentError, match="brings no plan for experts"):
        apply_expert_parallel(block, group=WORLD)
    assert apply_expert_parallel(block, {"experts": "experts"}, WORLD) is block

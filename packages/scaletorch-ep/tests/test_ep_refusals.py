"""Models that cannot be divided, and calls that differ between ranks: errors on every rank."""

import re

import pytest
import torch
import torch.distributed as c10d
from torch import nn

from scaletorch.dist import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.expert_parallel import apply_expert_parallel, combine, dispatch

WORLD = c10d.group.WORLD


class Experts(nn.Module):
    def __init__(self, experts=4, result=lambda x: x):
        super().__init__()
        self.num_experts, self.result = experts, result
        self.weight = nn.Parameter(torch.ones(experts, 3, 3))

    def forward(self, hidden, top_k_index, top_k_weights):
        return self.result(hidden @ self.weight[0] * top_k_weights.sum(1, keepdim=True))


class Routed(Experts):
    def forward(self, hidden):
        return hidden


class Looping(Experts):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4, 3))


class Two(Experts):
    def __init__(self):
        super().__init__()
        self.num_local_experts, self.other = 6, nn.Parameter(torch.ones(6, 2, 2))


class Normed(Experts):
    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(3))


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.ones(4, 3))


def _hooked():
    experts = Experts()
    experts.weight.register_hook(lambda grad: grad)
    return experts


def _replaced():
    experts = Experts()
    experts.forward = lambda *given: given[0]
    return experts


def _tied():
    experts = Experts()
    model = nn.ModuleDict({"experts": experts, "head": nn.Linear(3, 3)})
    model.head.weight = experts.weight
    return model


def _list():
    return nn.ModuleList(nn.Linear(3, 3) for _ in range(4))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = _list()

    def forward(self, hidden, top_k_index, top_k_weights):
        return hidden


class Called(nn.ModuleDict):
    """As the experts of Switch Transformers: a dict with a forward."""

    def __init__(self):
        super().__init__({f"expert_{number}": nn.Linear(3, 3) for number in range(4)})
        self.num_experts = 4

    def forward(self, hidden, top_k_index, top_k_weights):
        return hidden


def _params():
    return nn.ParameterList([torch.ones(3, 3)] * 4)


LIST = (
    "the experts of 'experts' are in a list ('experts{}', a {}), and experts in a list are not "
    "divided: stack them in parameters [4, ...], one for each weight"
)
CASES = {
    "no module": (Experts, {"expert": "experts"}, "matches no module; nearest module names: exp"),
    "no plan": (Experts, None, "has no plan for experts"),
    "no plan, and none would do": (Routed, None, re.escape("is called as Routed(hidden)")),
    "style": (Experts, {"experts": "column"}, "the style 'column'; the only style is 'experts'"),
    "no forward": (Silent, None, "own: move the computation of ex"),
    "list": (_list, None, re.escape(LIST.format("", "ModuleList"))),
    "parameters in a list": (_params, None, re.escape(LIST.format("", "ParameterList"))),
    "list in a module": (Listed, None, re.escape(LIST.format(".parts", "ModuleList"))),
    "dict with a forward": (Called, None, re.escape(LIST.format("", "Called"))),
    "no plan, and a list": (_list, None, re.escape(LIST.format("", "ModuleList"))),
    "routing": (Routed, None, re.escape("is called as Routed(hidden)")),
    "replaced": (_replaced, None, "was replaced on the instance"),
    "no stack": (Looping, None, "the number of experts of 'experts' .* is one of|is unknown"),
    "two numbers": (Two, None, re.escape("is one of [4, 6]")),
    "too few": (lambda: Experts(1), None, "each of 2 ranks needs at least one expert, got 1"),
    "hooks": (_hooked, None, "has gradient hooks"),
}


@distributed_test(world_size=2)
def test_models_that_cannot_be_divided_are_as_before():
    for case in CASES:
        _refused(case)


def _refused(case):
    make, plan, message = CASES[case]
    name = "moe" if case == "no plan" else "experts"  # which is known by its name
    model = nn.ModuleDict({name: make()})
    before = {name: id(each) for name, each in model.named_parameters()}
    if not case.startswith("no plan"):
        plan = plan or {"experts": "experts"}
    with pytest.raises(InvalidArgumentError, match=message):
        apply_expert_parallel(model, plan, WORLD)
    assert {name: id(each) for name, each in model.named_parameters()} == before
    assert type(model[name]).__mro__[1] is not type(model[name])


@distributed_test(world_size=2)
def test_ties_shared_parameters_and_twice():
    with pytest.raises(InvalidArgumentError, match=r"'head\.weight' is tied to a parameter of exp"):
        apply_expert_parallel(_tied(), {"experts": "experts"}, WORLD)
    model = nn.ModuleDict({"experts": Normed()})
    with pytest.raises(InvalidArgumentError, match=r"belong to all experts \(norm\).*use etp_size"):
        apply_expert_parallel(model, {"experts": "experts"}, WORLD, tp_group=WORLD)
    apply_expert_parallel(model, {"experts": "experts"}, WORLD)
    with pytest.raises(InvalidArgumentError, match="are divided already"):
        apply_expert_parallel(model, {"experts": "experts"}, WORLD)


@distributed_test(world_size=2)
def test_lists_of_anything_else_and_over_one_rank_are_let_be():
    apart = [nn.ModuleDict({"experts": make()}) for make in (_list, Listed, Called)]
    model = nn.ModuleList(apart)
    alone = c10d.new_group([c10d.get_rank()], use_local_synchronization=True)
    assert apply_expert_parallel(model, group=alone) is model
    assert [type(each.experts) for each in model] == [nn.ModuleList, Listed, Called]
    experts = Experts()
    experts.norms = nn.ModuleList(nn.LayerNorm(3) for _ in range(3))
    experts.more = nn.ParameterDict({name: torch.ones(4, 3, 3) for name in ("up", "down")})
    model = apply_expert_parallel(nn.ModuleDict({"experts": experts}), group=WORLD)
    assert {n: len(p) for n, p in model.experts.named_parameters() if len(p) == 2}.keys() == {
        "weight", "more.up", "more.down"
    }  # fmt: skip


def _call(**other):
    """Dispatch with something else on rank 1."""
    odd = other if c10d.get_rank() else {}
    given = {"tokens": 3, "top_k": 2, "dtype": torch.float32, "index": 1, "experts": 4} | odd
    hidden = torch.ones(given["tokens"], 3, dtype=given["dtype"])
    index = torch.full((given["tokens"], given["top_k"]), given["index"])
    with torch.set_grad_enabled(not given.get("frozen")):
        return dispatch(hidden, index, torch.ones(index.shape), given["experts"], WORLD)


DIFFERENT = (
    ({"top_k": 1}, "top-k 1"),
    ({"dtype": torch.bfloat16}, "hidden size 3, torch.bfloat16"),
    ({"experts": 5}, "experts on the ranks"),
    ({"frozen": True}, "gradients off"),
)


@distributed_test(world_size=2)
def test_calls_that_differ_are_an_error_on_every_rank():
    for other, line in DIFFERENT:
        with pytest.raises(MismatchError, match=line):
            _call(**other)
    kind = InvalidArgumentError if c10d.get_rank() else MismatchError
    for index in (-1, 4):
        outside = rf"rank 1 of the group routes tokens to experts \[{index}\]"
        with pytest.raises(kind, match=outside):
            _call(index=index)
    assert len(_call().hidden) == 6 * (c10d.get_rank() == 0)  # the group is as good as before


@distributed_test(world_size=2)
def test_arguments_that_do_not_fit():
    ones = torch.ones(3, 2)
    with pytest.raises(InvalidArgumentError, match="experts take hidden states"):
        dispatch(torch.ones(1, 3, 3), ones.long(), ones, 4, WORLD)
    with pytest.raises(InvalidArgumentError, match="experts take hidden states"):
        dispatch(torch.ones(3, 3), ones, ones, 4, WORLD)
    with pytest.raises(InvalidArgumentError, match="each of 2 ranks needs at least one expert"):
        dispatch(torch.ones(3, 3), ones.long(), ones, (4, 0), WORLD)
    route = _call().route
    with pytest.raises(InvalidArgumentError, match="one for each row"):
        combine(torch.ones(5, 3), route)


def _divided(experts):
    model = nn.ModuleDict({"experts": experts})
    return apply_expert_parallel(model, {"experts": "experts"}, WORLD)["experts"]


@distributed_test(world_size=2)
def test_experts_that_take_or_return_something_else():
    words = r"experts must return a tensor like their input, torch\.float32 \(\d, 3\), got a?.*"
    way_out = r"torch\.bfloat16 \(\d, 3\): let them return results\.to\(hidden\.dtype\)"
    for result, told in (
        (torch.Tensor.bfloat16, words + way_out),
        (lambda x: x[:, :2], words + r"torch\.float32 \(\d, 2\)$"),
        (lambda x: (x,), words + "tuple$"),
    ):
        experts = _divided(Experts(4, result if c10d.get_rank() else lambda x: x))
        with pytest.raises((InvalidArgumentError, MismatchError), match=told):
            experts(torch.ones(3, 3), torch.full((3, 1), 3), torch.ones(3, 1))
    with pytest.raises(InvalidArgumentError, match="takes three tensors"):
        _divided(Experts())(torch.ones(3, 3), None, top_k_weights=torch.ones(3, 1))
    with pytest.raises(InvalidArgumentError, match=r"hidden states \[T, H\].*got \(1, 3, 3\)"):
        _divided(Experts())(torch.ones(1, 3, 3), torch.ones(3, 1).long(), torch.ones(3, 1))


class OwnError(Exception):
    """Of no kind that this library knows."""


class Failing(Experts):
    """Fails on numbers beyond all bounds."""

    def forward(self, hidden, top_k_index, top_k_weights):
        if hidden.isinf().any():
            raise OwnError("of rows 0 to 2")
        return hidden * self.weight[top_k_index[:, 0], 0, 0, None] * top_k_weights


@distributed_test(world_size=2)
def test_what_a_module_of_experts_raises_is_heard_on_all():
    rank, experts = c10d.get_rank(), _divided(Failing())
    rows, to = torch.ones(2, 3), torch.tensor([[0], [3 * rank]])  # of rank 0 none leaves
    told = r"rank 1 cannot take part in .*the experts 'experts': OwnError: of rows 0 to 2"
    expected, words = (OwnError, "of rows 0 to 2") if rank == 1 else (MismatchError, told)
    beyond = torch.tensor([[1.0], [torch.inf if rank else 1.0]])
    for _ in range(2):
        with pytest.raises(expected, match=words):
            experts(beyond * rows, to, torch.ones(2, 1))
    assert torch.equal(experts(rows, to, torch.ones(2, 1)), rows)

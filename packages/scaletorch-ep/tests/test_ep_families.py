"""Every implementation of experts of transformers, beside one process on the whole batch."""

from itertools import product

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from scaletorch.dist.testing import preload, relative_error, run_ranks
from scaletorch.parallel.expert_parallel import (
    apply_expert_parallel,
    find_expert_cuts,
    gather_experts,
)

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)
preload("transformers.models.qwen3_moe.modeling_qwen3_moe")  # 1.4 s of a rank

ROWS, LENGTH = 4, 6
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 32, "initializer_range": 0.3, "num_experts_per_tok": 3,
}  # fmt: skip
FAMILIES = {
    "Qwen3Moe": {"num_experts": 6, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 5, "sliding_window": 4},
}  # fmt: skip


class Double(TorchFunctionMode):
    """Keeps float64 where models compute in float32, as routers do: else theirs is the rounding."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if function is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def _build(family, implementation):
    import transformers

    torch.manual_seed(1)
    options = SIZES | FAMILIES[family] | {"experts_implementation": implementation}
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model = model.to(torch.float32 if implementation == "grouped_mm" else torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_()  # zero or uninitialised as they come
    return model


def _loss(model, ids):
    logits = model(ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="sum") / (ROWS * (LENGTH - 1))


def _ids():
    return torch.randint(0, 32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))


def _compare(family, implementation):
    """Return the largest errors of loss and gradients beside one process, with their names."""
    ranks, rank = c10d.get_world_size(), c10d.get_rank()
    plain, model = (_build(family, implementation) for _ in range(2))
    apply_expert_parallel(model, group=c10d.group.WORLD)
    cuts = find_expert_cuts(model)
    with Double():
        expected, loss = _loss(plain, _ids()), _loss(model, _ids().tensor_split(ranks)[rank])
        for each in (expected, loss):
            each.backward()
    loss = loss.detach()
    c10d.all_reduce(loss)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name not in cuts:
            c10d.all_reduce(found[name])
    whole, wanted = gather_experts(model, found), dict(plain.named_parameters())
    assert whole.keys() == wanted.keys()
    errors = {name: relative_error(whole[name], wanted[name].grad) for name in wanted}
    errors["loss"] = relative_error(loss, expected.detach())
    return sorted(((error, name) for name, error in errors.items()), reverse=True)[:4]


CASES = [*product(FAMILIES, ("eager", "batched_mm", "grouped_mm"))]
BOUNDS = {"grouped_mm": 1e-5}  # it knows no float64 on a CPU


def _all_compared():
    return [_compare(*case) for case in CASES]


@pytest.mark.parametrize("ep", [2, 3])
def test_loss_and_every_gradient_are_one_process(ep):
    for found in run_ranks(_all_compared, ep, timeout=250):
        for case, errors in zip(CASES, found, strict=True):
            for error, name in errors:
                assert error <= BOUNDS.get(case[1], 1e-11), (case, name)

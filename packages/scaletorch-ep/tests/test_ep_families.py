"""Mixtures of experts of transformers, unmodified, beside one process on the whole batch."""

from contextlib import nullcontext

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
preload("transformers.models.mixtral.modeling_mixtral")  # 1.4 s of a rank

BOUND = 1e-11
FLOAT32 = 1e-6  # of routers that compute in float32, as their gradients do
ROWS, LENGTH = 4, 6
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "num_experts_per_tok": 3,
}
GROUPS = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
FAMILIES = {
    "Mixtral": {"num_local_experts": 5},
    "Qwen3Moe": {"num_experts": 6, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 6},
    "DeepseekV3": {
        **GROUPS,
        "n_routed_experts": 8,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
    "GptOss": {"num_local_experts": 5, "sliding_window": 4},
    "Glm4Moe": {**GROUPS, "n_routed_experts": 8},
}


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
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.uniform_(0, 0.1)
    return model


def _skew(model, kind):
    """Bias every router: one expert gets all first choices, or one gets nothing."""
    if kind == "drawn":
        return
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name.endswith(("mlp.gate", "mlp.router")) and weight is not None:
            # Hidden states are normed, so a router cannot be biased by its weights alone.
            module.register_forward_pre_hook(lambda _, args: (args[0].abs() + 0.1, *args[1:]))
            with torch.no_grad():
                weight[1] = 0.5 if kind == "one gets all" else -0.5


def _step(model, ids, recompute):
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    logits = model(ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="sum") / (ROWS * (LENGTH - 1))


def _ids():
    return torch.randint(0, 32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))


def _expected(family, implementation, kind):
    model = _build(family, implementation)
    _skew(model, kind)
    loss = _step(model, _ids(), False)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def _compare(family, implementation, kind, recompute):
    """Return loss and gradients beside one process: the worst names and differences."""
    with nullcontext() if recompute else Double():  # which recomputation in backward would not see
        return _compared(family, implementation, kind, recompute)


def _compared(family, implementation, kind, recompute):
    ranks, rank = c10d.get_world_size(), c10d.get_rank()
    expected_loss, expected = _expected(family, implementation, kind)
    model = _build(family, implementation)
    _skew(model, kind)
    apply_expert_parallel(model, group=c10d.group.WORLD)
    cuts = find_expert_cuts(model)
    loss = _step(model, _ids().tensor_split(ranks)[rank], recompute)
    loss.backward()
    loss = loss.detach()
    c10d.all_reduce(loss)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name not in cuts:
            c10d.all_reduce(found[name])
    whole = gather_experts(model, found)
    assert whole.keys() == expected.keys()
    errors = {name: relative_error(whole[name], expected[name]) for name in expected}
    errors["loss"] = relative_error(loss, expected_loss)
    return sorted(((error, name) for name, error in errors.items()), reverse=True)[:4]


def _all_compared(cases):
    return [(case, _compare(*case)) for case in cases]


IMPLEMENTED = [
    (family, implementation, kind, False)
    for family in ("Qwen3Moe", "GptOss")
    for implementation in ("batched_mm", "grouped_mm")
    for kind in ("drawn", "one gets all")
]
CASES = {  # ranks -> family, implementation, where tokens go, recomputation
    2: [*((family, "eager", "drawn", False) for family in FAMILIES), *IMPLEMENTED],
    3: [(family, "eager", kind, kind == "drawn") for family in FAMILIES for kind in
        ("drawn", "one gets all")],
    4: [(family, "eager", "one gets nothing", False) for family in FAMILIES],
}  # fmt: skip


def _bound(family, implementation, _, recompute):
    """grouped_mm knows no float64 on a CPU, nor do routers that are recomputed."""
    if implementation == "grouped_mm":
        return 1e-5
    return FLOAT32 if recompute and family in ("DeepseekV3", "Glm4Moe") else BOUND


@pytest.mark.parametrize("ep", CASES)
def test_loss_and_every_gradient_are_one_process(ep):
    for found in run_ranks(_all_compared, ep, CASES[ep], timeout=250):
        for case, errors in found:
            for error, name in errors:
                assert error <= _bound(*case), (case, name)

"""Mixtures of experts on every layout: losses, gradients, norms and steps of one process."""

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from scaletorch import compose
from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import preload, relative_error, run_ranks
from scaletorch.parallel.pg_manager import setup_process_group_manager

transformers = pytest.importorskip("transformers")
preload("torch._dynamo")  # which the first optimizer of a process imports
for name in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe"):
    preload(f"transformers.models.{name}.modeling_{name}")

STEPS, BOUND = 3, 1e-11
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "use_cache": False,
}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 4, "num_key_value_heads": 4},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,
        "num_key_value_heads": 4,
        "routed_scaling_factor": 1.5,
    },
    "GptOss": {"num_local_experts": 4, "sliding_window": 4},
    "Glm4Moe": {
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
}


class Exact(TorchFunctionMode):
    """Lets models that compute parts in float32 do so in float64, as the rest."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            wide = {torch.float32: torch.float64}
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = [
                    wide.get(each, each) if isinstance(each, torch.dtype) else each for each in args
                ]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def compute_exactly(model):
    """Switch that on in each module's forward, so also where backward runs it again."""
    running = []

    def begin(*_):
        running.append(Exact())
        running[-1].__enter__()

    def end(*_):
        running.pop().__exit__(None, None, None)

    for module in model.modules():
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
    return model


def build(family, **options):
    """A tiny model in float64, whose router's choices are far apart."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES[family], **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2, generator=generator)
        elif "bias" in name or "sinks" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return compute_exactly(model)


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 40, (8, 12), generator=generator)
    labels = torch.randint(0, 40, (8, 12), generator=generator)
    labels[step % 8, 3:] = -100
    return {"input_ids": ids, "labels": labels}


@cache
def reference(family):
    """Losses, norms, gradients of each step and weights at the end, of one process."""
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = batch(step)
        logits = model(whole["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten())
        loss.backward()
        losses.append(loss.detach())
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
    return losses, norms, gradients, copy.deepcopy(model.state_dict())


def train(expected, family, sizes, options, micro_batches, stage):
    manager = setup_process_group_manager(**sizes)
    losses, norms, gradients, weights = expected
    model = compose.parallelize(build(family), manager, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage:
        from scaletorch.parallel.data_parallel import shard_optimizer

        shard_optimizer(optimizer, model, stage=stage)
    for step in range(STEPS):
        optimizer.zero_grad()
        some = compose.shard_global_batch(batch(step), micro_batches, model=model)
        loss = compose.train_step(model, some)
        assert relative_error(loss, losses[step]) < BOUND
        found = compose.full_gradients(model)
        assert found.keys() == gradients[step].keys()
        for name, expected in gradients[step].items():
            if expected.abs().max() > 1e-12:
                assert relative_error(found[name], expected) < BOUND, (name, step)
        assert relative_error(compose.global_grad_norm(model), norms[step]) < BOUND
        compose.clip_grad_norm_(model, 0.3)
        optimizer.step()
    state = compose.full_state_dict(model)
    for name, expected in weights.items():
        assert relative_error(state[name], expected) < 1e-9, name
    compose.check_replicas(model)


def trained(ranks, family, sizes, options=None, micro_batches=1, stage=0):
    """Train on ranks, and compare all with one process."""
    given = family, sizes, options or {}, micro_batches, stage
    run_ranks(train, ranks, reference(family), *given, timeout=120)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    trained(4, family, {"dp_size": 4, "ep_size": 2})


LAYOUTS = [
    ({"dp_size": 4, "ep_size": 4}, {}, 2, 0),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, {}, 1, 0),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, {}, 1, 0),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, {"sequence_parallel": True}, 1, 1),
    ({"dp_size": 2, "cp_size": 2, "ep_size": 4}, {}, 1, 2),
    ({"dp_size": 2, "pp_size": 2, "ep_size": 2}, {"recompute": True}, 2, 1),
    ({"cp_size": 2, "tp_size": 2, "ep_size": 2}, {}, 1, 0),
]


@pytest.mark.parametrize(("sizes", "options", "micro_batches", "stage"), LAYOUTS)
def test_layouts(sizes, options, micro_batches, stage):
    trained(4, "Qwen3Moe", sizes, options, micro_batches, stage)


BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.7}


def balanced_reference(family):
    """The loss with the routers' own, written out, and its gradients; of one process."""
    model, whole = build(family, **BALANCE), batch(0)
    output = model(whole["input_ids"])
    scores = torch.cat(output.router_logits).softmax(-1)
    chosen = nn.functional.one_hot(scores.topk(2).indices, scores.shape[-1]).sum((0, 1)).double()
    balance = scores.shape[-1] * (chosen / len(scores) * scores.mean(0)).sum()
    loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), whole["labels"].flatten())
    assert relative_error(balance, output.aux_loss) < 1e-6  # which is computed in float32
    (loss + 0.7 * balance).backward()
    return loss + 0.7 * balance, {n: p.grad for n, p in model.named_parameters()}


def balanced(family, sizes, options):
    manager = setup_process_group_manager(**sizes)
    expected, gradients = balanced_reference(family)
    model = compose.parallelize(build(family, **BALANCE), manager, **options)
    loss = compose.train_step(model, compose.shard_global_batch(batch(0), 1, model=model))
    assert relative_error(loss, expected) < BOUND
    found = compose.full_gradients(model)
    for name, gradient in gradients.items():
        assert relative_error(found[name], gradient) < BOUND, name
    with pytest.raises(InvalidArgumentError, match="which 2 micro-batches cannot compute"):
        compose.train_step(model, compose.shard_global_batch(batch(0), 2, model=model))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp_size": 4, "ep_size": 2}, {"recompute": True}),
        ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, {"sequence_parallel": True}),
        ({"cp_size": 2, "tp_size": 2, "ep_size": 2}, {}),
    ],
)
def test_the_routers_own_loss_is_of_the_global_batch(sizes, options):
    run_ranks(balanced, 4, "Qwen3Moe", sizes, options, timeout=120)

"""LoRA put on a model that is parallel already trains as in one process that puts it on."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from test_adapters import LAYERS, SHARDED, base, batch, is_adapter
from test_verify_experts import small

from scaletorch.checkpoint import export_adapter
from scaletorch.compose import (
    add_adapters,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.compose.forward import pipeline_of
from scaletorch.dist.errors import InvalidArgumentError, MismatchError, ScaletorchError
from scaletorch.dist.testing import preload, relative_error, run_ranks, worst
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [
    pytest.mark.timeout(300),  # the first ranks import peft
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing"),  # of peft, by transformers
    pytest.mark.filterwarnings("ignore:Already found a .peft_config"),  # of the second adapter
]

TWO = {
    "tp2": ({"tp_size": 2}, {}),
    "tp2_sequence": ({"tp_size": 2}, SHARDED),
    "pp2": ({"pp_size": 2}, {"schedule": "zb_v"}),
    "cp2": ({"cp_size": 2}, {}),
    "dp2_zero": ({"dp_size": 2}, {"recompute": True}),
}
TIED = {"pp2_tied": ({"pp_size": 2}, {})}
FOUR = {"tp2_pp2": ({"tp_size": 2, "pp_size": 2}, {**SHARDED, "recompute": True})}
ADAPTERS = {  # one after another, each trained for two steps
    "default": {"target_modules": [*LAYERS], "init_lora_weights": False},
    "other": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
}


@pytest.fixture(scope="module", autouse=True)
def _imports():
    preload("torch._dynamo", "peft", "transformers.models.llama.modeling_llama")


def config(name):
    return peft.LoraConfig(r=3, lora_alpha=6, **ADAPTERS[name])


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@cache
def expected(tied):
    """Return losses, norms and gradients of one process, and the adapters' weights at the end."""
    model, steps = base(tie_word_embeddings=tied).double(), []
    for seed, name in enumerate(ADAPTERS):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config(name), model, name)
        optimizer = optimizer_of(model)
        for step in range(2):
            whole = batch(step)
            logits = model(input_ids=whole["input_ids"]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten())
            loss.backward()
            held = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            norm = torch.nn.utils.get_total_norm(held.values())
            steps.append((loss.item(), norm.item(), held))
            optimizer.step()
            optimizer.zero_grad()
    weights = {n: p.detach() for n, p in model.named_parameters() if is_adapter(n)}
    return steps, weights


def train(name, sizes, options, folder):
    manager, steps, tied = setup_process_group_manager(**sizes), [], name.endswith("tied")
    plain = base(tie_word_embeddings=tied).double()
    model = parallelize(plain, manager, **options, rehearse=False)
    train_step(model, shard_global_batch(batch(7), 2, model=model))  # gradients to be dropped
    for seed, name in enumerate(ADAPTERS):
        torch.manual_seed(seed)
        model = add_adapters(model, config(name), name)
        optimizer = optimizer_of(model)
        if manager.cp_dp_size > 1:
            shard_optimizer(optimizer, model, overlap=True)
        for step in range(2):
            loss = train_step(model, shard_global_batch(batch(step), 2, model=model))
            held = full_gradients(model)
            steps.append((loss.item(), clip_grad_norm_(model, math.inf).item(), held))
            optimizer.step()
            optimizer.zero_grad()
    for name in ADAPTERS:
        export_adapter(model, folder / name, adapter=name)
    weights = full_state_dict(model, only=is_adapter)
    split = [each for n, each in model.named_modules() if n.endswith(".lora_A.default")]
    assert all("forward" in vars(each) for each in split) or "schedule" not in options  # later
    assert [tie.trained for tie in pipeline_of(model).ties] == [False] * tied  # sent no more
    destroy_process_group_manager()
    return steps, weights


def layouts(wanted, folder):
    return {name: train(name, *each, folder / name) for name, each in wanted.items()}


@pytest.mark.parametrize("wanted", [TWO | TIED, FOUR], ids=["two", "four"])
def test_adapters_after_parallelize_train_like_one_process(wanted, tmp_path):
    ranks = max(math.prod(sizes.values()) for sizes, _ in wanted.values())
    told = run_ranks(layouts, ranks, wanted, tmp_path, timeout=200)
    for layout in wanted:
        known, final = expected(layout.endswith("tied"))
        for steps, weights in [results[layout] for results in told]:
            for (loss, norm, held), (one, whole, theirs) in zip(steps, known, strict=True):
                assert loss == pytest.approx(one, rel=1e-12)
                assert norm == pytest.approx(whole, rel=1e-11)
                assert held.keys() == theirs.keys()
                assert worst(relative_error(held[n], g) for n, g in theirs.items()) < 1e-10
            assert weights.keys() == final.keys()
            assert worst(relative_error(w, final[n]) for n, w in weights.items()) < 1e-10
        for name in ADAPTERS:
            saved = safetensors.load_file(tmp_path / layout / name / "adapter_model.safetensors")
            theirs = peft.get_peft_model(base(), config(name), name)  # and the names of its files
            assert saved.keys() == peft.get_peft_model_state_dict(theirs, adapter_name=name).keys()
            own = {n.replace(f".{name}", ""): w for n, w in final.items() if f".{name}." in n}
            assert (
                worst(relative_error(saved[f"base_model.model.{n}"], w) for n, w in own.items())
                < 1e-10
            )


def refused():
    plain = base().double()
    one, other = peft.LoraConfig(target_modules=["q_proj"]), "on the plain model, parallelize"
    manager = setup_process_group_manager(tp_size=2)
    with pytest.raises(InvalidArgumentError, match=f"takes what parallelize returned.*{other}"):
        add_adapters(plain, one)
    before = parallelize(plain, manager, rehearse=False)
    for options, words in REFUSED.values():
        with pytest.raises(ValueError, match=words):
            add_adapters(before, peft.LoraConfig(**{"target_modules": ["q_proj"], **options}))
    assert not any(is_adapter(name) for name, _ in before.named_parameters())
    torch.manual_seed(manager.tp_rank)
    with pytest.raises(MismatchError, match=r"adapters that add_adapters draws.*torch.manual_seed"):
        add_adapters(before, one)
    torch.manual_seed(0)
    after = add_adapters(before, one)
    with pytest.raises(InvalidArgumentError, match="has an adapter 'default' already"):
        add_adapters(after, one)
    with pytest.raises(ScaletorchError, match="add_adapters, and use what it returns"):
        train_step(before, shard_global_batch(batch(0), 2, model=before))
    destroy_process_group_manager()


REFUSED = {
    "kept whole": ({"modules_to_save": ["lm_head"]}, "has modules_to_save: put it on the plain"),
    "of weights": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' reads weights"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "more than two matrices beside a linear"),
    "dora": ({"use_dora": True}, "more than two matrices .*lora_magnitude_vector"),
    "nowhere": ({"target_modules": ["nowhere"]}, "not found in the base model"),  # peft's own words
}


def test_adapters_that_cannot_be_added_later_are_refused():
    run_ranks(refused, 2)


def refused_in_experts():
    manager = setup_process_group_manager(dp_size=2, ep_size=2)
    model = small()
    for layer in model.layers:  # an expert a row, in a linear layer
        layer.mlp.experts.scale = torch.nn.Linear(16, 4, bias=False)
    model = parallelize(model.double(), manager, rehearse=False)
    inside = peft.LoraConfig(target_modules=["scale", "q_proj"])
    with pytest.raises(InvalidArgumentError, match="it is in experts, which are divided"):
        add_adapters(model, inside)
    model = add_adapters(model, peft.LoraConfig(target_modules=["q_proj"]))
    loss = train_step(model, shard_global_batch(batch(0), 2, model=model))
    assert math.isfinite(loss)
    destroy_process_group_manager()


def test_adapters_of_divided_experts_cannot_be_added_later():
    run_ranks(refused_in_experts, 2)

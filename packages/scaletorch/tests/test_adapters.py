"""LoRA of peft on frozen models of transformers trains on every layout as in one process."""

from itertools import product

import pytest
import torch
from sweeps import today
from training import (
    cross_entropy,
    grid,
    in_one_process,
    ranks_of,
    require_alike,
    take_steps,
    train_and_compare,
)

from scaletorch.checkpoint import CheckpointError, export_adapter
from scaletorch.compose import full_state_dict, parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import distributed_test, preload, run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [
    pytest.mark.timeout(300),  # the first ranks import peft
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing"),  # of peft, by transformers
]

SIZES = {  # heads that two ranks share out two to one
    "vocab_size": 32, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64,
    "use_cache": False, "attn_implementation": "sdpa",
}  # fmt: skip
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS = 2
SHARDED = {"sequence_parallel": True, "loss_parallel": True}
LAYOUTS = {
    "tp2": ({"tp_size": 2}, {}),
    "tp2_sequence": ({"tp_size": 2}, SHARDED),
    "pp2": ({"pp_size": 2}, {"schedule": "zb_v"}),
    "cp2": ({"cp_size": 2}, {}),
    "dp2_zero": ({"dp_size": 2}, {}),
    "model8": ({"tp_size": 2, "cp_size": 2, "pp_size": 2}, SHARDED),
    "data8": ({"tp_size": 2, "pp_size": 2, "dp_size": 2}, {"recompute": True}),
}


@pytest.fixture(scope="module", autouse=True)
def _imports():
    preload("peft", "transformers.models.llama.modeling_llama")


def base():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4.0)
    return model


def adapted(**options):
    options = {"r": 3, "lora_alpha": 6, "target_modules": [*LAYERS], **options}
    config = peft.LoraConfig(init_lora_weights=False, **options)
    return peft.get_peft_model(base(), config).double()


def batch(step):
    tokens = torch.randint(32, (8, 13), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    labels[1, 3:], labels[6, :4] = -100, -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


@pytest.fixture(scope="module")
def expected():
    return in_one_process(adapted(), [batch(step) for step in range(STEPS)], adam)


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def is_adapter(name):
    return "lora_" in name


def train(sizes, options, folder):
    with grid(sizes) as manager:
        model = parallelize(adapted(), manager, **options, rehearse=False)
        optimizer = adam(model)
        if manager.cp_dp_size > 1:
            shard_optimizer(optimizer, model)
        found = take_steps(model, optimizer, [batch(step) for step in range(STEPS)], 2)
        export_adapter(model, folder)
        with pytest.raises(CheckpointError, match="has an adapter already"):
            export_adapter(model, folder)
        return found, full_state_dict(model, only=is_adapter)


@pytest.mark.parametrize("layout", today([*LAYOUTS], 7))
def test_every_layout_trains_adapters_like_one_process(layout, expected, tmp_path):
    sizes, options = LAYOUTS[layout]
    for found, own in run_ranks(train, ranks_of(sizes), sizes, options, tmp_path, timeout=200):
        require_alike(found, expected, 1e-10, losses=1e-12, norms=1e-11)
        assert all(map(is_adapter, found.gradients[0]))
        assert own.keys() == {name for name in expected.weights if is_adapter(name)}
        assert all(torch.equal(own[name], found.weights[name]) for name in own)
    saved = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == peft.get_peft_model_state_dict(adapted()).keys()  # as peft writes them
    loaded = peft.PeftModel.from_pretrained(base().double(), tmp_path).double()
    with torch.no_grad():
        total, count = cross_entropy(loaded(batch(STEPS - 1)["input_ids"]), batch(STEPS - 1))
    assert (total / count).item() == pytest.approx(found.evaluations[-1], rel=1e-12)


def dropped():
    """Return what adapters drop in a step, in forward and again in backward, of which inputs."""
    found = {}
    options = {"lora_dropout": 0.5, "target_modules": ["q_proj", "down_proj", "lm_head"]}
    with grid({"tp_size": 2}) as manager:
        for shares in (False, True):
            how = {"sequence_parallel": shares, "recompute": True, "rehearse": False}
            model = parallelize(adapted(**options), manager, **how)

            def note(name, output, shares=shares):
                found.setdefault((name, shares), []).append((tuple(output.shape), output == 0))

            for name in ("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj", "lm_head"):
                ending = f"{name}.lora_dropout"
                drop = next(m for n, m in model.named_modules() if n.endswith(ending))
                drop["default"].register_forward_hook(lambda _m, _i, y, name=name: note(name, y))
            train_step(model.train(), shard_global_batch(batch(0), 1, model=model))
    return found


def test_inputs_that_all_ranks_have_are_dropped_alike_and_no_others():
    one, other = run_ranks(dropped, 2)
    query, down, head = "layers.0.self_attn.q_proj", "layers.0.mlp.down_proj", "lm_head"
    for found in (one, other):
        for (name, _), masks in found.items():
            assert len(masks) == (1 if name == head else 2)  # a layer is computed again
            assert all(torch.equal(mask, masks[0][1]) for _, mask in masks)
            assert 0.3 < masks[0][1].double().mean() < 0.7
    assert one.keys() == other.keys() == {*product((query, down, head), (False, True))}
    alike = {k for k in one if torch.equal(one[k][0][1], other[k][0][1])}
    assert alike == {(query, False), (head, False), (head, True)}
    # With shares of sequences a block has gathered its input, and so has the last layer.
    shapes = [one[n, True][0][0] for n in (query, down, head)]
    assert shapes == [(8, 12, 24), (8, 12, 12), (8, 12, 24)]


def nested():
    """Return a model with adapters around adapters, of a linear layer of each kind."""
    from peft.tuners.lora import Linear

    model, config = base(), peft.LoraConfig(init_lora_weights=False)
    torch.manual_seed(1)
    for layer in model.model.layers:
        for name in ("q_proj", "o_proj"):
            inner = Linear(layer.self_attn.get_submodule(name), "a", config=config, r=2)
            setattr(layer.self_attn, name, Linear(inner, "b", config=config, r=3))
    return model.double()


@pytest.mark.parametrize("shares", [False, True])
def test_adapters_around_adapters_train_over_tp_like_one_process(shares):
    given = in_one_process(nested(), [batch(0)]), nested, {"tp_size": 2}, [batch(0)]
    bounds = {"bound": 1e-10, "losses": 1e-12}
    train_and_compare(*given, options={"sequence_parallel": shares}, bounds=bounds)


REFUSED = {
    "an embedding": ({"target_modules": ["embed_tokens"]}, "VocabParallelEmbedding, and only"),
    "dora": ({"use_dora": True}, "it is none of plain LoRA.* lora_magnitude_vector"),
}


@distributed_test(world_size=2)
def test_adapters_that_cannot_be_cut_are_refused():
    with grid({"tp_size": 2}) as manager:
        for options, message in REFUSED.values():
            model = adapted(**options)
            names = [name for name, _ in model.named_parameters()]
            with pytest.raises(ScaletorchError, match=message):
                parallelize(model, manager, rehearse=False)
            assert names == [name for name, _ in model.named_parameters()]


def injected(model):
    plain = model.get_submodule("module.module")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), plain)
    return model


def around(model):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


@distributed_test(world_size=2)
def test_adapters_after_parallelize_are_refused_with_the_way_out():
    whole = batch(0)
    message = r"lora_A.* came after the module was wrapped .*adapters.*get_peft_model of the plain"
    none = "has no adapter 'default' of peft; it has none"
    with grid({"dp_size": 2}) as manager:
        for inject in (injected, around):
            model = parallelize(base(), manager, rehearse=False)
            with pytest.raises(ScaletorchError, match=none):
                export_adapter(model, "nowhere")
            adapted = inject(model)
            with pytest.raises(ScaletorchError, match=message):
                train_step(adapted, shard_global_batch(whole, 2, model=model))
            with pytest.raises(ScaletorchError, match=message):  # in a loop of one's own
                adapted(input_ids=whole["input_ids"])
    with grid({"tp_size": 2}) as manager:
        model = parallelize(base(), manager, rehearse=False)
        for inject in (injected, around):
            with pytest.raises(ValueError, match=r"module ColumnParallelLinear.*not supported"):
                inject(model)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_an_adapter_has_the_names_that_peft_gives_it(alone, tmp_path, options):
    name = "model"  # as of a module that it lies in
    config = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], **options)
    model = peft.get_peft_model(base(), config, adapter_name=name)
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"]))
    export_adapter(parallelize(model, alone, rehearse=False), tmp_path / "ours", adapter=name)
    how = {"selected_adapters": [name], "save_embedding_layers": False}
    model.save_pretrained(tmp_path / "theirs", **how)
    ours = safetensors.load_file(tmp_path / "ours" / "adapter_model.safetensors")
    theirs = safetensors.load_file(tmp_path / "theirs" / name / "adapter_model.safetensors")
    assert any("lora_embedding_A" in each for each in theirs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[each], theirs[each]) for each in theirs)


def test_an_adapter_is_whole_if_another_has_the_name_of_a_module(alone, tmp_path):
    layers = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(base(), peft.LoraConfig(**layers))
    model.add_adapter("mlp", peft.LoraConfig(**layers))
    weights = model.state_dict()
    model = parallelize(model, alone, rehearse=False)
    for adapter in ("default", "mlp"):
        export_adapter(model, tmp_path / adapter, adapter=adapter)
        saved = safetensors.load_file(tmp_path / adapter / "adapter_model.safetensors")
        ending = f".{adapter}.weight"
        named = {name: x for name, x in weights.items() if is_adapter(name) and ending in name}
        assert len(named) == 4 * 2 * 2  # layers, linear layers, matrices
        assert saved.keys() == {name.replace(ending, ".weight") for name in named}
        assert all(torch.equal(x, saved[n.replace(ending, ".weight")]) for n, x in named.items())


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (peft.LoraConfig, {"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        (peft.LoraConfig, {"bias": "lora_only"}, "has bias"),
        (peft.LoraConfig, {"trainable_token_indices": [1, 2]}, "has trainable_token_indices"),
        (peft.IA3Config, {"feedforward_modules": []}, "is of kind IA3"),
    ],
)
def test_an_adapter_of_more_than_its_matrices_is_not_exported(
    alone, tmp_path, kind, options, words
):
    model = peft.get_peft_model(base(), kind(target_modules=["q_proj"], **options))
    with pytest.raises(ScaletorchError, match=f"adapter 'default' {words}, and of adapters only"):
        export_adapter(parallelize(model, alone, rehearse=False), tmp_path)
    assert not any(tmp_path.iterdir())

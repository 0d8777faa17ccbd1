"""Models of transformers that make masks of their own are right with sequence parallelism."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from scaletorch.dist import RankPool
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, gather_tensors

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(400)  # each rank imports transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
# Windows of 5 and 12 of 16 tokens: a share of 8 fits into the second, and is no sequence.
WINDOWS = [("mistral", {"sliding_window": window}) for window in (5, 12, None)]
RANKS = {"q_lora_rank": 16, "kv_lora_rank": 16}
LATENT = {**RANKS, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DECODER = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8}
SLICED = {"pretraining_tp": 2, "slow_but_exact": True}
LAYERWISE = {  # it reshapes what it embeds for each layer in its own code
    "head_dim": 8, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
    "laurel_rank": 4, "altup_num_inputs": 2, "num_kv_shared_layers": 0, "sliding_window": 5,
    "activation_sparsity_pattern": [0.0, 0.0], "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4}
BLOOM = {"n_head": 4, "n_layer": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}
FAMILIES = [
    *WINDOWS,
    ("mistral", {"sliding_window": 12, "attn_implementation": "eager"}),
    ("gemma3_text", {"sliding_window": 5, "head_dim": 8}),
    ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}),
    ("olmo2", {}),  # norms over all heads: its attention is no region
    ("youtu", {**LATENT, "num_key_value_heads": 4, "head_dim": 8}),
    ("minicpm3", {**LATENT, "num_key_value_heads": 4}),  # its latent attention is divided
    ("bert", {"is_decoder": True}),  # its attention ends in another module, its head is whole
    ("roberta", {"is_decoder": True}),  # which counts positions behind its padding
    ("camembert", {"is_decoder": True}),  # whose head is registered before what it follows
    ("bart", {**DECODER, "d_model": 32}),  # which counts positions of its shares
    ("bamba", {**STATES, "attn_layer_indices": [1]}),
    # Shares in the layers alone: what they are given is made of whole sequences.
    ("openai-gpt", SMALL),
    ("gemma3n_text", LAYERWISE),
    ("bloom", BLOOM),  # which adds residuals inside of its attention and MLP
    ("roformer", {"is_decoder": True}),
]
UNSHARDED = {"**.mlp.c_fc": "column", "**.mlp.c_proj": "row", "transformer.h.*": "sequence_layer"}


def build(kind, options):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SIZES, **options})
    how = {name: options[name] for name in ("attn_implementation",) if name in options}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **how).double().eval()


def tokens():
    return torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))


def loss(model, mask=None):
    logits = model(input_ids=tokens(), attention_mask=mask, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())


def compare(kind, options, plan=None, mask=None):
    one, many = build(kind, options), build(kind, options)
    apply_tensor_parallel(many, plan, dist.group.WORLD, sequence_parallel=True)
    losses = [loss(model, mask) for model in (one, many)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    for each in losses:
        each.backward()
    found = {n: p.grad for n, p in many.named_parameters() if p.grad is not None}
    gradients = gather_tensors(many, found)
    expected = {n: p for n, p in one.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, parameter in expected.items():
        difference = (gradients[name] - parameter.grad).norm()
        assert difference <= 1e-5 * parameter.grad.norm() + 1e-12, (name, difference)
    return losses[0].item()


def families():
    found = [compare(kind, options) for kind, options in FAMILIES]
    assert len({*found[:3]}) == 3  # both windows matter
    small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "num_attention_heads": 4}
    compare("gpt2", {**small, "hidden_size": 32}, UNSHARDED)  # attention that the plan leaves whole
    padding = torch.ones(2, 16, dtype=torch.long)
    padding[1, 12:] = 0
    compare("bloom", BLOOM, mask=padding)
    compare("mistral", {"sliding_window": 12}, mask=padding)
    import transformers.masking_utils as masks

    assert not masks.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping  # nothing stays behind


def pooled():
    """What takes the first token of a sequence takes it of the whole one."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    one = AutoModel.from_config(AutoConfig.for_model("bert", **SIZES)).double().eval()
    many = apply_tensor_parallel(copy.deepcopy(one), None, dist.group.WORLD, sequence_parallel=True)
    outs = [model(input_ids=tokens()).pooler_output for model in (one, many)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)


def shared():
    """Return how many tokens a layer and its MLP are given, and what is behind the layers."""
    model, seen = build("bloom", BLOOM), []
    apply_tensor_parallel(model, None, dist.group.WORLD, sequence_parallel=True)
    layer = model.transformer.h[0]
    for module in (layer.input_layernorm, layer.mlp, model.transformer.ln_f):
        module.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    loss(model)
    return seen


def refused():
    for kind, options, message in (
        ("bloom", {**SLICED, "n_head": 4, "n_layer": 1}, "mlp' has slow_but_exact: it computes o"),
        # Of these few train a model any more; a user may, with a plan.
        ("jetmoe", EXPERTS, "is of no known model family; print.explain"),
        ("ctrl", {**SMALL, "dff": 48}, "is of no known model family; print.explain"),
        (
            "xlnet",
            {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48},
            ": complete it, and pass it as plan=",
        ),
        ("rwkv", {"attention_hidden_size": 32}, "of no known model family; print.explain"),
        ("persimmon", {}, "of no known model family; print.explain"),
        ("bitnet", {}, "Llama has such names, but .* has attn_sub_norm.* pass it as plan="),
        (
            "trocr",
            {**DECODER, "d_model": 32},
            "BART has such names, but .* has kdim.* pass it as plan=",
        ),
    ):
        for sequence_parallel in (False, True):
            with pytest.raises(InvalidArgumentError, match=message):
                apply_tensor_parallel(
                    build(kind, options),
                    None,
                    dist.group.WORLD,
                    sequence_parallel=sequence_parallel,
                )
    dropping = build("bart", {**DECODER, "d_model": 32, "decoder_layerdrop": 0.1})
    with pytest.raises(InvalidArgumentError, match="leaves out layers at random"):
        apply_tensor_parallel(dropping, None, dist.group.WORLD, sequence_parallel=True)


def test_masks_and_whole_attention():
    with RankPool(2, timeout=300) as pool:
        pool.run(families)
        pool.run(pooled)


def test_sequences_are_shared_out_in_the_layers_alone():
    with RankPool(2, timeout=300) as pool:
        ours, others = pool.run(shared)
    assert ours == others == [8, 8, 16]


def test_what_computes_otherwise_or_has_no_plan_is_refused():
    with RankPool(2, timeout=300) as pool:
        pool.run(refused)

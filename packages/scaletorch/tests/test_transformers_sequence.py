"""Transformers that divide sequences over tp or cp: with masks of their own, or refused."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from refused_calls import require_words, words_of
from tiny_transformers import SIZES, tiny

from scaletorch.dist.errors import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.context_parallel import (
    ShardedSequences,
    apply_context_parallel,
    shard_batch,
)
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, gather_tensors

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(400)  # each rank imports transformers

# Windows of 5 and 12 of 16 tokens: a share of 8 fits into the second, and is no sequence.
WINDOWS = [("mistral", {"sliding_window": window}) for window in (5, 12, None)]
BART = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "d_model": 32}
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4}
BLOOM = {"n_head": 4, "n_layer": 2}
FAMILIES = [  # `tools/families` has all that train, without padding and such windows
    *WINDOWS,
    ("mistral", {"sliding_window": 12, "attn_implementation": "eager"}),
    ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}),
    ("roberta", {"is_decoder": True}),  # which counts positions behind its padding
    ("bart", BART),  # which counts positions
    ("openai-gpt", SMALL),
    ("bloom", BLOOM),  # which adds residuals inside of its attention and MLP
]
UNSHARDED = {"**.mlp.c_fc": "column", "**.mlp.c_proj": "row"}


def build(kind, options=None, head="ForCausalLM"):
    import transformers

    options = options or {}
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **options})
    how = {name: options[name] for name in ("attn_implementation",) if name in options}
    torch.manual_seed(0)
    auto = getattr(transformers, f"AutoModel{head}")
    return auto.from_config(config, **how).double().eval()


def divided(model, plan=None):
    return apply_tensor_parallel(model, plan, dist.group.WORLD, sequence_parallel=True)


def tokens():
    return torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(1))


def loss(model, mask=None):
    logits = model(input_ids=tokens(), attention_mask=mask, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())


def compare(kind, options, plan=None, mask=None):
    one, many = build(kind, options), divided(build(kind, options), plan)
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


@distributed_test(world_size=2, timeout=300)
def test_masks_and_whole_attention():
    found = [compare(kind, options) for kind, options in FAMILIES]
    assert len({*found[:3]}) == 3  # both windows matter
    compare("gpt2", {**SMALL, "n_positions": 32}, UNSHARDED)  # attention is left whole
    padding = torch.ones(2, 16, dtype=torch.long)
    padding[1, 12:] = 0
    compare("bloom", BLOOM, mask=padding)
    compare("mistral", {"sliding_window": 12}, mask=padding)


@distributed_test(world_size=2, timeout=300)
def test_behind_the_layers_sequences_are_whole():
    """As for a pooler, which takes the first token; in the layers each rank has a share."""
    one, many = build("bert", head=""), divided(build("bert", head=""))
    outs = [model(input_ids=tokens()).pooler_output for model in (one, many)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    model, lengths = divided(build("bloom", BLOOM)), []
    layer = model.transformer.h[0]
    for module in (layer.input_layernorm, layer.mlp, model.transformer.ln_f):
        module.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    loss(model)
    assert lengths == [8, 8, 16]


@distributed_test(world_size=2, timeout=300)
def test_a_cache_has_keys_of_whole_sequences():
    from transformers import DynamicCache

    outs = []
    one, many = build("llama"), divided(build("llama"))
    name = "cache" if "cache" in inspect.signature(one.forward).parameters else "past_key_values"
    for model in (one, many):
        cache = {name: DynamicCache()}
        for _ in range(2):
            out = model(input_ids=tokens(), use_cache=True, **cache).logits
        outs.append(out)
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)


@distributed_test(world_size=2, timeout=300)
def test_what_would_be_wrong_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"BitNetForCausalLM has no plan .*=suggest_pla"):
        divided(build("bitnet"))
    with pytest.raises(InvalidArgumentError, match="leaves out layers at random"):
        divided(build("bart", BART | {"decoder_layerdrop": 0.1}))


@distributed_test(world_size=4, timeout=300)
def test_masks_and_positions_of_a_shard_that_is_divided_again():
    manager = setup_process_group_manager(cp_size=2, tp_size=2)
    model = apply_tensor_parallel(build("llama"), None, manager.tp_group, sequence_parallel=True)
    apply_context_parallel(model, manager.cp_group, layout="zigzag")
    given = shard_batch({"input_ids": tokens()}, manager.cp_group, layout="zigzag")
    ones = torch.ones(2, 8, dtype=torch.long)
    model(**given, attention_mask=ones, use_cache=False)
    for odd, words in (
        ({"position_ids": torch.arange(8)[None]}, "position_ids are not those of this rank's"),
        ({"attention_mask": ones.tril()}, "attention_mask must hold no zeros"),
    ):
        with pytest.raises(
            (InvalidArgumentError, MismatchError), match=f"{words}|cannot take part"
        ):
            model(**given | odd, use_cache=False)


LENGTH = 16
DECODERS = {
    "n_embd": 32, "d_model": 32, "n_layer": 2, "n_layers": 2, "num_layers": 2, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "is_decoder": True, "use_cache": False,
}  # fmt: skip
CONTEXT_FAMILIES = {
    "Bloom": {},
    "OpenAIGPT": {"n_positions": 32},
    "DeepseekV32": {
        "num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "index_n_heads": 2,
        "index_head_dim": 8, "index_topk": 4,
    },
    "Bart": {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    "Doge": {},
    "Falcon": {"alibi": True, "new_decoder_architecture": False},
}  # fmt: skip


def _step(name):
    """Return a call that makes a family context parallel, and runs it."""

    def step(batch):
        kind = "LMHeadModel" if name == "OpenAIGPT" else "ForCausalLM"
        plain = tiny(name, kind, **DECODERS | CONTEXT_FAMILIES[name])
        model = apply_context_parallel(plain, dist.group.WORLD, layout="contiguous")
        model(batch["input_ids"], position_ids=batch["position_ids"])

    return step


def _pools(_):
    apply_context_parallel(tiny("Llama", "ForSequenceClassification"), dist.group.WORLD)


def _convolves(_):
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 8}
    speech = transformers.WhisperConfig(encoder_ffn_dim=16, max_source_positions=16, **sizes)
    encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(speech)
    apply_context_parallel(encoder, dist.group.WORLD)


def _sees(batch):
    """Text goes through a model with a tower, and an image does not."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=tiny("Llama", use_cache=False).config,
        image_token_index=3,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model = apply_context_parallel(model, dist.group.WORLD, layout="contiguous")
    sequences = ShardedSequences(LENGTH, layout="contiguous", group=dist.group.WORLD)
    mine = sequences.shard({"input_ids": torch.full((2, LENGTH), 5)})
    model(**mine)
    model(**mine, pixel_values=torch.ones(2, 3, 8, 8))


REFUSED = {
    _step("Bloom"): "BloomForCausalLM takes no position_ids",
    _step("OpenAIGPT"): "OpenAIGPTModel computes its attention itself",
    _step("DeepseekV32"): "has layers of indexed_attention",
    _step("Bart"): "BartForCausalLM takes no position_ids and would count its positions from 0",
    _step("Falcon"): "attn_mask must be None",
    _step("Doge"): "the model changes its attention mask by",
    _pools: "LlamaForSequenceClassification pools over the sequence",
    _convolves: "WhisperEncoder takes input_features, and cp divides the positions",
    _sees: "CLIPVisionModel is run, and text alone can be divided",
}


def _refuse():
    ids = torch.randint(3, 32, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    return words_of(REFUSED, {"input_ids": ids})


def test_what_would_be_of_a_shard_is_refused():
    require_words(REFUSED, run_ranks(_refuse, 2, timeout=240))

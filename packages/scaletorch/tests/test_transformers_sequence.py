"""Models of transformers that make masks of their own are right with sequence parallelism."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_transformers import SIZES

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, gather_tensors

pytest.importorskip("transformers")

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
    ("bart", BART),  # which counts positions of its shares
    ("openai-gpt", SMALL),  # shares in the layers alone
    ("bloom", BLOOM),  # the same, and it adds residuals inside of its attention and MLP
]
UNSHARDED = {"**.mlp.c_fc": "column", "**.mlp.c_proj": "row", "transformer.h.*": "sequence_layer"}


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
    import transformers.masking_utils as masks

    assert not masks.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping  # nothing stays behind


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
def test_what_would_be_wrong_is_refused():
    from transformers import DynamicCache

    with pytest.raises(InvalidArgumentError, match=r"BitNetForCausalLM has no plan .*=suggest_pla"):
        divided(build("bitnet"))
    with pytest.raises(InvalidArgumentError, match="leaves out layers at random"):
        divided(build("bart", BART | {"decoder_layerdrop": 0.1}))
    many = build("llama")
    names = inspect.signature(many.forward).parameters
    cache = {"cache" if "cache" in names else "past_key_values": DynamicCache()}
    divided(many)
    many(input_ids=tokens(), use_cache=True, **cache)
    with pytest.raises(InvalidArgumentError, match=r"from position \d+ on.*pass use_cache=False"):
        many(input_ids=tokens(), use_cache=True, **cache)  # its keys are of two calls

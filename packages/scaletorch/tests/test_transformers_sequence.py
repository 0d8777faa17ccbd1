"""Models of transformers that make masks of their own are right with sequence parallelism."""

import copy
import inspect

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
DECODER = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
SLICED = {"pretraining_tp": 2, "slow_but_exact": True}
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4}
BLOOM = {"n_head": 4, "n_layer": 2}
FAMILIES = [  # `tools/families` has all that train, without padding and such windows
    *WINDOWS,
    ("mistral", {"sliding_window": 12, "attn_implementation": "eager"}),
    ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}),
    ("roberta", {"is_decoder": True}),  # which counts positions behind its padding
    ("bart", {**DECODER, "d_model": 32}),  # which counts positions of its shares
    ("openai-gpt", SMALL),  # shares in the layers alone
    ("bloom", BLOOM),  # the same, and it adds residuals inside of its attention and MLP
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
        ("bitnet", {}, "BitNetForCausalLM has no plan .* pass plan=suggest_plan"),
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


def cached():
    """A call with the cache of an earlier one is refused: its keys are of two calls."""
    from transformers import DynamicCache

    many = build("llama", {})
    names = inspect.signature(many.forward).parameters
    cache = {"cache" if "cache" in names else "past_key_values": DynamicCache()}
    apply_tensor_parallel(many, None, dist.group.WORLD, sequence_parallel=True)
    many(input_ids=tokens(), use_cache=True, **cache)
    with pytest.raises(InvalidArgumentError, match=r"from position \d+ on.*pass use_cache=False"):
        many(input_ids=tokens(), use_cache=True, **cache)


def test_masks_and_whole_attention():
    with RankPool(2, timeout=300) as pool:
        pool.run(families)
        pool.run(pooled)
        assert pool.run(shared) == [[8, 8, 16]] * 2  # sequences are shared in the layers alone
        pool.run(refused)


def test_a_cache_is_refused():
    with RankPool(2, timeout=300) as pool:
        pool.run(cached)

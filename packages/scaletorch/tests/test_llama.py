"""The built-in models are a Llama and a Mixtral: another library's have their logits."""

from dataclasses import replace

import pytest
import torch

from scaletorch.dist.testing import relative_error, worst
from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.verify import default_model
from scaletorch.verify.precision import model_precision

SIZES = LlamaConfig(
    vocab_size=48, hidden_size=32, intermediate_size=56, num_layers=3, num_heads=8, num_kv_heads=2
)
THETA = 2.0**16  # transformers has the frequencies in float32: with 4 elements a head, 1 and 2**-8
NAMES = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip


def both(model, config, family, **options):
    """Return a model with weights that all matter, and that of transformers with the same ones."""
    transformers = pytest.importorskip("transformers")
    model.double()
    for parameter in model.parameters():  # the usual 0.02 leaves attention nearly uniform
        parameter.data += torch.randn_like(parameter) * 0.2
    sizes = {theirs: getattr(config, ours) for ours, theirs in NAMES.items()}
    sizes["rope_parameters"] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    other = getattr(transformers, f"{family}Config")(**sizes, **options, use_cache=False)
    other = getattr(transformers, f"{family}ForCausalLM")(other).double()
    state = model.state_dict()
    other.load_state_dict({n if "lm_head" in n else f"model.{n}": t for n, t in state.items()})
    return model, other


def require_same(model, other, ours, theirs):
    """Compare logits and gradients; each model has its own options."""
    ids, labels = torch.randint(48, (2, 2, 11))
    logits, gradients = trained(model, ids, labels, **ours)
    expected, wanted = trained(other, ids, labels, **theirs)
    assert relative_error(logits, expected) < 1e-12
    assert set(gradients) == set(wanted)
    assert worst(relative_error(gradients[name], wanted[name]) for name in wanted) < 1e-11


def trained(model, ids, labels, **options):
    with model_precision(torch.float64):
        out = model(ids, **options)
        logits = getattr(out, "logits", out)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    found = {name.removeprefix("model."): p.grad for name, p in model.named_parameters()}
    return logits.detach(), found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("positions", [None, [3, 4, 5, 9, 10, 200, 201, 2, 0, 1, 40]])
def test_logits_and_gradients_are_those_of_transformers(tied, positions):
    torch.manual_seed(0)
    config = replace(SIZES, tie_embeddings=tied, rope_theta=THETA)
    model, other = both(Llama(config), config, "Llama")
    options = {} if positions is None else {"position_ids": torch.tensor([positions, positions])}
    # Without a mask, transformers guesses documents from positions.
    mask = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril()
    require_same(model, other, options, {"attention_mask": mask, **options})


def test_the_mixture_has_logits_and_gradients_of_mixtral():
    torch.manual_seed(0)
    config = MixtureConfig(48, 32, 24, 2, 8, 2, THETA, num_experts=5, top_k=2)
    model, other = both(Mixture(config), config, "Mixtral", num_local_experts=5)
    other.set_experts_implementation("eager")
    require_same(model, other, {}, {})


def test_the_model_that_is_verified_is_this_one():
    assert type(default_model()) is Llama

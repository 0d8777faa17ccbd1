"""The built-in models are a Llama and a Mixtral: another library's have their logits."""

from dataclasses import asdict

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
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "rope_theta": "rope_theta",
    "intermediate_size": "intermediate_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip


def of_transformers(config, state):
    transformers = pytest.importorskip("transformers")
    sizes = {NAMES[name]: value for name, value in asdict(config).items()}
    sizes["rope_parameters"] = {"rope_theta": sizes.pop("rope_theta"), "rope_type": "default"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))
    named = {
        name if name.startswith("lm_head") else f"model.{name}": t for name, t in state.items()
    }
    model.double().load_state_dict(named)
    return model


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
    config = LlamaConfig(**{**asdict(SIZES), "tie_embeddings": tied, "rope_theta": THETA})
    model = Llama(config).double()
    for parameter in model.parameters():  # the usual 0.02 leaves attention nearly uniform
        parameter.data += torch.randn_like(parameter) * 0.2
    other = of_transformers(config, model.state_dict())
    ids, labels = torch.randint(48, (2, 2, 11))
    options = {}
    if positions is not None:
        options = {"position_ids": torch.tensor([positions, positions])}
    logits, gradients = trained(model, ids, labels, **options)
    # Without a mask, transformers guesses documents from positions.
    mask = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril()
    expected, wanted = trained(other, ids, labels, attention_mask=mask, **options)
    assert relative_error(logits, expected) < 1e-12
    assert set(gradients) == set(wanted)
    assert worst(relative_error(gradients[name], wanted[name]) for name in wanted) < 1e-11


def test_the_model_that_is_verified_is_this_one():
    assert type(default_model()) is Llama


def test_the_mixture_has_logits_and_gradients_of_mixtral():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = MixtureConfig(48, 32, 24, 2, 8, 2, THETA, num_experts=5, top_k=2)
    model = Mixture(config).double()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    sizes = {NAMES[n]: getattr(config, n) for n in NAMES if n != "rope_theta"}
    sizes |= {"num_local_experts": 5, "num_experts_per_tok": 2, "use_cache": False}
    sizes["rope_parameters"] = {"rope_theta": THETA, "rope_type": "default"}
    other = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).double()
    other.set_experts_implementation("eager")
    other.load_state_dict(
        {n if n.startswith("lm_head") else f"model.{n}": t for n, t in model.state_dict().items()}
    )
    ids, labels = torch.randint(48, (2, 2, 11))
    logits, gradients = trained(model, ids, labels)
    expected, wanted = trained(other, ids, labels)
    assert relative_error(logits, expected) < 1e-12
    assert set(gradients) == set(wanted)
    assert worst(relative_error(gradients[name], wanted[name]) for name in wanted) < 1e-11

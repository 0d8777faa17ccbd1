"""Small models that several files of tests send to ranks, by name."""

from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.verify.problem import sharpened

SMALL = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2
)
SMALL_MIXTURE = MixtureConfig(
    vocab_size=64, hidden_size=16, intermediate_size=8, num_layers=2, num_heads=4, num_kv_heads=2,
    num_experts=4,
)  # fmt: skip


def small_model():
    return Llama(SMALL)


def small_mixture():
    return sharpened(Mixture(SMALL_MIXTURE))

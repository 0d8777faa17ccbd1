"""Small models that proofs are tried on, and one that ranks answer differently."""

from dataclasses import replace

from torch import nn
from training import SIZES

from scaletorch.dist import get_rank
from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.verify.problem import sharpened

SMALL = LlamaConfig(**SIZES | {"vocab_size": 64})
SMALL_MIXTURE = MixtureConfig(**SIZES | {"vocab_size": 64, "intermediate_size": 8}, num_experts=4)


def small_model():
    return Llama(SMALL)


def small_mixture():
    return sharpened(Mixture(SMALL_MIXTURE))


def one_layer():
    return Llama(replace(SMALL, num_layers=1))


class UnlikeOnRanks(Llama):
    """Its head answers a little differently on each rank, as a forgotten broadcast would."""

    def __init__(self):
        super().__init__(SMALL)

    def forward(self, input_ids, position_ids=None):
        return super().forward(input_ids, position_ids) * (1 + 1e-6 * get_rank())


class Stack(nn.Module):
    """An embedding, layers and a head, of which `run` calls a layer."""

    def __init__(self, layers, width=8, words=32):
        super().__init__()
        self.embed, self.layers = nn.Embedding(words, width), nn.ModuleList(layers)
        self.head = nn.Linear(width, words)

    def run(self, layer, x):
        return layer(x)

    def hidden(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.run(layer, x)
        return x

    def forward(self, input_ids):
        return self.head(self.hidden(input_ids))

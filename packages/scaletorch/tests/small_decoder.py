"""A decoder of four linear layers and one attention, and its batches, for tests on two ranks."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, HIDDEN = 12, 8
PLAN = {"embed": "vocab", "layers.0": "column", "layers.1": "row"}
DP, CP, TP, PP = ({f"{axis}_size": 2} for axis in ("dp", "cp", "tp", "pp"))
V = ("schedule", "zb_v")


class Decoder(nn.Module):
    """A flag that the first call sets, and sizes of the last call, are as in one process."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids):
        self.begun, self.length = True, input_ids.shape[1]
        x = self.embed(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        heads = x.unsqueeze(1)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.head(x + attended.squeeze(1))


def made():
    torch.manual_seed(0)
    return Decoder().double()


def loss_of(model, given):
    logits = model(given["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(VOCAB, (2, 8, 8), generator=generator)
    return {"input_ids": ids, "labels": labels}

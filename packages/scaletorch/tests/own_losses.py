"""Losses of one's own, each twice: as a loss_fn on any layout, and as one process writes it."""

import torch
import torch.nn.functional as F
from torch import nn
from training import SIZES

from scaletorch.compose import (
    forward_step,
    last_token,
    log_probs,
    sequence_sums,
    token_log_probs,
    token_losses,
    vocabulary_sums,
)
from scaletorch.models import Llama, LlamaConfig
from scaletorch.models.llama import rotary_tables

ROWS, LENGTH, VOCAB, CLASSES = 8, 11, 32, 5
CONFIG = LlamaConfig(**SIZES | {"vocab_size": VOCAB, "num_layers": 4})


class Scored(Llama):
    """A head of one score for each position, whole on every rank."""

    def __init__(self, config):
        super().__init__(config)
        del self.lm_head
        self.score = nn.Linear(config.hidden_size, 1, bias=False)  # pairs would cancel one out

    def forward(self, input_ids, position_ids=None):
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        cos, sin = rotary_tables(position_ids, 4, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.score(self.norm(x))


def language(seed=0):
    return drawn(Llama(CONFIG), seed)


def teacher():
    return language(1)


def classifier():
    model = Llama(CONFIG)
    model.lm_head = nn.Linear(CONFIG.hidden_size, CLASSES)
    return drawn(model, 2)


def reward():
    return drawn(Scored(CONFIG), 3)


def drawn(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        shift = float(parameter.ndim < 2)
        parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.3).add(shift)
    return model.double()


def batch():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[1, 3:], labels[4, :5], labels[7, 9:] = -100, -100, -100
    return {
        "input_ids": tokens[:, :-1],
        "labels": labels,
        "loss_last": torch.tensor([10, 3, 7, 10, 5, 0, 9, 2]),
        "loss_class": torch.randint(CLASSES, (ROWS,), generator=generator),
        "loss_weights": torch.rand((ROWS, LENGTH), generator=generator, dtype=torch.float64),
    }


def tokens(batch):
    return (batch["labels"] != -100).sum()


def rows(batch):
    return len(batch["input_ids"])


def pairs(batch):
    return len(batch["input_ids"]) // 2


def preferred(scores):
    chosen, rejected = scores.view(-1, 2).unbind(-1)
    return -F.logsigmoid(chosen - rejected).sum()


def smoothed(output, batch):
    return token_losses(output, batch, label_smoothing=0.1).sum(), tokens(batch)


def with_z_loss(output, batch):
    return token_losses(output, batch, z_loss=0.01).sum(), tokens(batch)


def weighted(output, batch):
    weights = batch["loss_weights"] * (batch["labels"] != -100)
    return (token_losses(output, batch) * weights).sum(), weights.sum()


def weights_of(batch):
    return (batch["loss_weights"] * (batch["labels"] != -100)).sum()


def distilled(output, batch):
    theirs, ours = batch["loss_teacher"], log_probs(output, batch)
    divergences = vocabulary_sums(theirs.exp() * (theirs - ours), batch)
    return divergences[batch["labels"] != -100].sum(), tokens(batch)


def log_prob(output, batch):
    return sequence_sums(token_log_probs(output, batch), batch)


def dpo(output, batch):
    gains = log_prob(output, batch) - batch["loss_reference"]
    return preferred(0.5 * gains), gains.numel() // 2


def spread(output, batch):
    """Goes by all positions, with a label or without."""
    sums = sequence_sums(vocabulary_sums(log_probs(output, batch), batch), batch)
    return sums.square().sum(), rows(batch)


def classified(output, batch):
    logits = last_token(output, batch, batch["loss_last"])
    return F.cross_entropy(logits, batch["loss_class"], reduction="sum"), rows(batch)


def ranked(output, batch):
    return preferred(last_token(output, batch).squeeze(-1)), pairs(batch)


# Name -> the model, its loss_fn and count_fn, and what a second model makes for it.
LOSSES = {
    "smoothing": (language, smoothed, None, None),
    "z_loss": (language, with_z_loss, None, None),
    "weights": (language, weighted, weights_of, None),
    "distillation": (language, distilled, None, ("loss_teacher", log_probs)),
    "dpo": (language, dpo, pairs, ("loss_reference", log_prob)),
    "spread": (language, spread, rows, None),
    "classes": (classifier, classified, rows, None),
    "reward": (reward, ranked, pairs, None),
}


def prepare(second, entry, function, micro_batches):
    """Put what a second model makes of micro-batches into them."""
    made = forward_step(second, micro_batches, function)
    for each, found in zip(micro_batches, made, strict=True):
        each[entry] = found


def in_one_process(name):
    """Return the loss and all gradients, written in plain torch for the whole batch."""
    model, whole = LOSSES[name][0](), batch()
    loss = PLAIN[name](model(whole["input_ids"]), whole)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def _cross_entropy(logits, batch, **options):
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), **options)


def _with_z(logits, batch):
    z = logits.logsumexp(-1)[batch["labels"] != -100].square().mean()
    return _cross_entropy(logits, batch) + 0.01 * z


def _weighted(logits, batch):
    losses = _cross_entropy(logits, batch, reduction="none").view_as(batch["labels"])
    return (losses * batch["loss_weights"]).sum() / weights_of(batch)


@torch.no_grad()
def _of_teacher(batch):
    return teacher()(batch["input_ids"]).log_softmax(-1)


def _distilled(logits, batch):
    counted = batch["labels"] != -100
    ours, theirs = logits.log_softmax(-1)[counted], _of_teacher(batch)[counted]
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean")


def _sums(log_probs, batch):
    found = log_probs.gather(-1, batch["labels"].clamp(min=0)[..., None]).squeeze(-1)
    return found.masked_fill(batch["labels"] == -100, 0).sum(1)


def _dpo(logits, batch):
    gains = _sums(logits.log_softmax(-1), batch) - _sums(_of_teacher(batch), batch)
    return -F.logsigmoid(0.5 * (gains[::2] - gains[1::2])).mean()


PLAIN = {
    "smoothing": lambda logits, batch: _cross_entropy(logits, batch, label_smoothing=0.1),
    "z_loss": _with_z,
    "weights": _weighted,
    "distillation": _distilled,
    "dpo": _dpo,
    "spread": lambda logits, batch: logits.log_softmax(-1).sum((1, 2)).square().mean(),
    "classes": lambda logits, batch: F.cross_entropy(
        logits[torch.arange(ROWS), batch["loss_last"]], batch["loss_class"]
    ),
    "reward": lambda scores, batch: -F.logsigmoid(
        (scores[::2] - scores[1::2])[:, -1, 0]
    ).mean(),
}  # fmt: skip

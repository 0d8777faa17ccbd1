"""Tiny models that are no decoders of tokens, with batches and losses, for tests."""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

ROWS, WORDS = 7, 24


class Model(NamedTuple):
    """A model, its batch of each step, and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    loss: Callable[..., Any]
    micro_batches: int = 2


def of_transformers(model, config, **sizes):
    import transformers

    return getattr(transformers, model)(getattr(transformers, f"{config}Config")(**sizes))


_SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
_IMAGES = {"image_size": 6, "patch_size": 2, "num_channels": 3}
_TOWER = {**_SIZES, "projection_dim": 12}
_TEXT = {"vocab_size": WORDS, "max_position_embeddings": 8, "eos_token_id": WORDS - 1,
         "bos_token_id": 0}  # fmt: skip


def vit():
    sizes = {**_SIZES, **_IMAGES, "num_labels": 5, "hidden_dropout_prob": 0.0}
    return of_transformers("ViTForImageClassification", "ViT", **sizes)


def clip():
    towers = {"text_config": {**_TOWER, **_TEXT}, "vision_config": {**_TOWER, **_IMAGES}}
    return of_transformers("CLIPModel", "CLIP", **towers, projection_dim=12)


def clip_vision():
    return of_transformers("CLIPVisionModel", "CLIPVision", **_TOWER, **_IMAGES)


def clip_text():
    return of_transformers("CLIPTextModel", "CLIPText", **_TOWER, **_TEXT)


def whisper():
    stack = {"layers": 2, "attention_heads": 4, "ffn_dim": 24}
    stacks = {f"{side}_{n}": size for side in ("encoder", "decoder") for n, size in stack.items()}
    lengths = {"max_source_positions": 6, "max_target_positions": 12, "num_mel_bins": 5}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    own = {"vocab_size": WORDS, "d_model": 16, "decoder_start_token_id": 1, **special}
    given = {**stacks, **lengths, **own}
    return of_transformers("WhisperForConditionalGeneration", "Whisper", **given)


def t5():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    own = {"vocab_size": WORDS, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return of_transformers("T5ForConditionalGeneration", "T5", **sizes, **own)


class Half(nn.Module):
    """One level of a U-Net, on the way down or up."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x):
        return F.silu(self.norm(self.convolution(x)))


class UNet(nn.Module):
    def __init__(self, widths=(4, 8, 16)):
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.ModuleList(Half(*pair) for pair in pairs)
        self.up = nn.ModuleList(Half(wide + narrow, narrow) for narrow, wide in reversed(pairs[1:]))
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x):
        skips = []
        for level in self.down:
            skips.append(level(x))
            x = F.avg_pool2d(skips[-1], 2)
        x = skips.pop()
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)


def drawn(step, *shape):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)


def tokens(step, *shape, most=WORDS):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(2, most, (ROWS, *shape), generator=generator)


def pictures(step):
    return {"pixel_values": drawn(step, 3, 6, 6)}


def of_classes(step):
    return {**pictures(step), "labels": tokens(step + 10, most=5)}


def texts(step):
    ids = tokens(step, 8, most=WORDS - 1)
    ids[:, -1] = WORDS - 1
    return {"input_ids": ids}


def of_texts(step):
    return {**texts(step), "loss_target": drawn(step + 10, 16)}


def of_pictures(step):
    return {**pictures(step), "loss_target": drawn(step + 10, 16)}


def pairs(step):
    return {**texts(step), **pictures(step)}


def speech(step):
    ids = tokens(step + 10, 9)
    sound = {"input_features": drawn(step, 5, 12)}
    return {**sound, "decoder_input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}


def translations(step, source=8, target=8):
    ids = tokens(step + 10, target + 1)
    given = {"input_ids": tokens(step, source), "decoder_input_ids": ids[:, :-1]}
    return {**given, "loss_labels": ids[:, 1:].contiguous()}


def longer(step):
    return translations(step, 12, 8)


def denoising(step):
    return {"x": drawn(step, 3, 8, 8), "loss_target": drawn(step + 10, 3, 8, 8)}


def of_class(output, micro_batch):
    total = F.cross_entropy(output.logits, micro_batch["labels"], reduction="sum")
    return total, len(output.logits)


def of_target(output, micro_batch):
    found = getattr(output, "pooler_output", output)
    return ((found - micro_batch["loss_target"]) ** 2).sum(), found.numel()


def of_rows(output, micro_batch):
    """The contrast of each picture with all texts of the micro-batch, and of each text."""
    logits = output.logits_per_text
    diagonal = torch.arange(len(logits))
    total = sum(F.cross_entropy(x, diagonal, reduction="sum") for x in (logits, logits.T))
    return total / 2, len(logits)


def of_words(output, micro_batch):
    labels = micro_batch.get("labels", micro_batch.get("loss_labels"))
    total = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, labels.numel()


MODELS = {
    "vit": Model(vit, of_classes, of_class),
    "clip": Model(clip, pairs, of_rows),
    "clip, one micro-batch": Model(clip, pairs, of_rows, 1),
    "clip_vision": Model(clip_vision, of_pictures, of_target),
    "clip_text": Model(clip_text, of_texts, of_target),
    "whisper": Model(whisper, speech, of_words),
    "t5": Model(t5, translations, of_words),
    "t5, longer": Model(t5, longer, of_words),
    "unet": Model(UNet, denoising, of_target),
}
LAYOUTS = {
    "dp4": {"dp_size": 4},
    "zero1": {"dp_size": 4, "zero": 1},
    "zero2": {"dp_size": 4, "zero": 2},
    "tp4": {"tp_size": 4},
    "tp2-dp2": {"tp_size": 2, "dp_size": 2},
    "sp4": {"tp_size": 4, "sequence_parallel": True},
    "sp2-dp2": {"tp_size": 2, "dp_size": 2, "sequence_parallel": True},
    "pp4": {"pp_size": 4},
    "pp2-dp2": {"pp_size": 2, "dp_size": 2},
    "pp2-tp2": {"pp_size": 2, "tp_size": 2},
    "cp4": {"cp_size": 4},
    "cp2-dp2": {"cp_size": 2, "dp_size": 2},
}
RIGHT = ""
_NO_PLAN = r"UNet has no plan of its own .* pass plan=suggest_plan\(model, example\)"
_NO_LAYERS = r"cannot tell which modules are the layers: .*UNet has .*; pass Split\("
_CP = r"cp divides .* it is not known where this batch .* sequence_dims=.* or take cp_size=1"
_CROSS = r"{} was called with two sequences, .*; do without sequence parallelism"
_OF_IMAGES = r"{} takes pixel_values, and cp divides .*: take cp_size=1"
_COUNTS = r"T5\w+ (takes no position_ids|computes its attention itself)"
_ROWS = (
    r"CLIPModel computes something else .* the loss is off .*"
    r"dp and micro-batches divide rows: compute each from that row alone"
)
_TOWERS = {
    "pp": (
        r"the model's own code between its layers raised|depends on this stage's layers, but not "
        r"through the output of the last one"
    ),
    "cp": r"CLIPVisionModel is run, and text alone can be divided.*keep sequences whole",
}


# What is refused, by the beginnings of names of layouts, in words; all else is right.
REFUSED = {
    "vit": {"cp": _OF_IMAGES.format("ViTForImageClassification")},
    "clip": {**_TOWERS, "": _ROWS},
    "clip, one micro-batch": {**_TOWERS, "tp4": RIGHT, "sp4": RIGHT, "": _ROWS},
    "clip_vision": {"cp": _OF_IMAGES.format("CLIPVisionModel")},
    "clip_text": {"cp": r"CLIPTextModel computes something else .*cp divides positions: mix them"},
    "whisper": {"sp": _CROSS.format("WhisperAttention"), "cp": _CP},
    "t5": {"sp": _CROSS.format("T5Attention"), "cp": _COUNTS},
    "t5, longer": {"sp": _CROSS.format("T5Attention"), "cp": _COUNTS},
    "unet": {**dict.fromkeys(("pp2-tp2", "tp", "sp"), _NO_PLAN), "pp": _NO_LAYERS, "cp": _CP},
}
CELLS = [*product(MODELS, LAYOUTS)]


def outcome(name, layout):
    """The words in which a cell is refused; RIGHT if it trains."""
    return next((words for key, words in REFUSED[name].items() if layout.startswith(key)), RIGHT)

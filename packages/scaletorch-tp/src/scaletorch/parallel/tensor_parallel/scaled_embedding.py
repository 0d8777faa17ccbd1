"""Shards of the embeddings of transformers that multiply what they look up by a constant."""

from __future__ import annotations

from torch import Tensor, nn

from .layers import VocabParallelEmbedding


class ScaledVocabParallelEmbedding(VocabParallelEmbedding):
    """A vocabulary-parallel embedding whose rows are scaled by `embed_scale` (Gemma, BART)."""

    embed_scale: Tensor | float

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Tell whether `module` is one, by name and structure: its library may be absent."""
        kind = type(module)
        named = kind.__name__.endswith("ScaledWordEmbedding") and kind.__bases__ == (nn.Embedding,)
        return named and isinstance(getattr(module, "embed_scale", None), Tensor | float | int)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up whole rows and scale them: ids of any shape to [..., embedding_dim]."""
        scale = self.embed_scale
        rows = super().forward(ids)
        return rows * (scale.to(self.weight.dtype) if isinstance(scale, Tensor) else scale)

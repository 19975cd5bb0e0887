"""The same encoder in plain torch: what the rudnn one is compared with and timed against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .checkpoint import Config

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Reference:
    """The torch encoder; q, k and v are one product and attention is fused, as in ours."""

    def __init__(self, weights: Mapping[str, np.ndarray], config: Config) -> None:
        self.config = config
        self.weights = {name: torch.from_numpy(array) for name, array in weights.items()}
        self.fused = [self._fuse(f"encoder.layer.{i}.attention.self") for i in range(config.layers)]

    def _fuse(self, at: str) -> tuple[Tensor, Tensor]:
        weight, bias = (
            torch.cat([self.weights[f"{at}.{name}.{part}"] for name in ("query", "key", "value")])
            for part in ("weight", "bias")
        )
        return weight, bias

    @torch.inference_mode()
    def __call__(self, ids: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Return unit sentence vectors, f32 [B, H], from ids int64 [B, T] and keep bool [B, T]."""
        kept = torch.from_numpy(keep)
        x = self._embed(torch.from_numpy(ids))
        for index in range(self.config.layers):
            x = self._layer(x, kept[:, None, None, :], index)
        mean = x.masked_fill(~kept[:, :, None], 0).sum(1) / kept.sum(1, keepdim=True).clamp(min=1)
        return F.normalize(mean, dim=1, eps=1e-12).numpy()

    def _embed(self, ids: Tensor) -> Tensor:
        words = F.embedding(ids, self.weights["embeddings.word_embeddings.weight"])
        positions = self.weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        kind = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self._norm(words + positions + kind, "embeddings.LayerNorm")

    def _layer(self, x: Tensor, mask: Tensor, index: int) -> Tensor:
        at = f"encoder.layer.{index}"
        batch, tokens, width = x.shape
        heads = self.config.heads
        qkv = F.linear(x, *self.fused[index]).view(batch, tokens, 3, heads, width // heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        context = context.transpose(1, 2).reshape(batch, tokens, width)
        x = x + self._linear(context, f"{at}.attention.output.dense")
        x = self._norm(x, f"{at}.attention.output.LayerNorm")
        hidden = self._linear(x, f"{at}.intermediate.dense")
        hidden = ACTIVATIONS[self.config.activation](hidden)
        x = x + self._linear(hidden, f"{at}.output.dense")
        return self._norm(x, f"{at}.output.LayerNorm")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        gamma, beta = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, gamma.shape, gamma, beta, self.config.epsilon)

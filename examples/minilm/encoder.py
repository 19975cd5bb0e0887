"""The BERT encoder on rudnn kernels: NumPy arrays in, NumPy arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import rudnn

from .checkpoint import CheckpointError, Config
from .pooling import mean_pool


@dataclass(frozen=True)
class Dense:
    """A linear layer whose weight is packed once for the kernel; bias f32 [out]."""

    weight: rudnn.nn.PackedWeight
    bias: np.ndarray

    def __call__(
        self, x: np.ndarray, activation: str | None = None, residual: np.ndarray | None = None
    ) -> np.ndarray:
        """Map x [..., in] to [..., out]; the activation comes first, then the residual."""
        return rudnn.nn.linear(x, self.weight, self.bias, activation=activation, residual=residual)


@dataclass(frozen=True)
class Norm:
    """A layer norm over the last axis; gamma and beta f32 [H]."""

    gamma: np.ndarray
    beta: np.ndarray
    epsilon: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return x [..., H] normalised, in its own shape."""
        return rudnn.normalization.layer_norm(x, self.gamma, self.beta, epsilon=self.epsilon)


@dataclass(frozen=True)
class Layer:
    """One transformer block: attention, then two dense layers, each normalised after its sum."""

    qkv: Dense
    out: Dense
    attention_norm: Norm
    up: Dense
    down: Dense
    norm: Norm
    heads: int
    activation: str

    def __call__(self, x: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Map x [B, T, H] to its like; keep is bool [B, T]."""
        x = self.attention_norm(self.out(self._attend(x, keep), residual=x))
        hidden = self.up(x, activation=self.activation)
        return self.norm(self.down(hidden, residual=x))

    def _attend(self, x: np.ndarray, keep: np.ndarray) -> np.ndarray:
        batch, tokens, width = x.shape
        # Heads are views, [B, heads, T, D]: the kernel reads and writes strides, nothing is moved.
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        context = np.empty((batch, tokens, self.heads, width // self.heads), np.float32)
        rudnn.attention.attention(
            query, key, value, mask=keep[:, None, None, :], out=context.transpose(0, 2, 1, 3)
        )
        return context.reshape(batch, tokens, width)


class Encoder:
    """A sentence encoder; weights are read and packed once, calls are thread-safe.

    Parameters
    ----------
    weights
        f32 arrays under the names of a BERT checkpoint, dense weights [out, in].
    config
        The layers, heads, epsilon and activation of the checkpoint.
    """

    def __init__(self, weights: Mapping[str, np.ndarray], config: Config) -> None:
        read = _Reader(weights, config)
        self.config = config
        self.words = read("embeddings.word_embeddings.weight")  # [V, H]
        # Single sentences have token type 0 throughout, so its row joins the positions for good.
        self.positions = rudnn.nn.add(
            read("embeddings.position_embeddings.weight"),
            read("embeddings.token_type_embeddings.weight")[0],
        )  # [P, H]
        self.norm = read.norm("embeddings.LayerNorm")
        self.layers = [read.layer(index) for index in range(config.layers)]

    def __call__(self, ids: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Return unit sentence vectors, f32 [B, H], from ids int64 [B, T] and keep bool [B, T]."""
        return mean_pool(self.hidden(ids, keep), keep)

    def hidden(self, ids: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Return the last layer's token vectors, f32 [B, T, H]."""
        words = rudnn.nn.embedding(ids, self.words)
        x = self.norm(rudnn.nn.add(words, self.positions[: ids.shape[1]]))
        for layer in self.layers:
            x = layer(x, keep)
        return x


class _Reader:
    """Builds the layers from a checkpoint's names; a missing one is a `CheckpointError`."""

    def __init__(self, weights: Mapping[str, np.ndarray], config: Config) -> None:
        self.weights = weights
        self.config = config

    def __call__(self, name: str) -> np.ndarray:
        if name not in self.weights:
            raise CheckpointError(f"the weights have no tensor {name!r}")
        return self.weights[name]

    def dense(self, *names: str) -> Dense:
        """Return one dense layer that stacks the outputs of those named."""
        weight = np.concatenate([self(f"{name}.weight") for name in names])
        bias = np.concatenate([self(f"{name}.bias") for name in names])
        return Dense(rudnn.nn.PackedWeight(weight), bias)

    def norm(self, name: str) -> Norm:
        return Norm(self(f"{name}.weight"), self(f"{name}.bias"), self.config.epsilon)

    def layer(self, index: int) -> Layer:
        at = f"encoder.layer.{index}"
        return Layer(
            qkv=self.dense(*(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))),
            out=self.dense(f"{at}.attention.output.dense"),
            attention_norm=self.norm(f"{at}.attention.output.LayerNorm"),
            up=self.dense(f"{at}.intermediate.dense"),
            down=self.dense(f"{at}.output.dense"),
            norm=self.norm(f"{at}.output.LayerNorm"),
            heads=self.config.heads,
            activation=self.config.activation,
        )

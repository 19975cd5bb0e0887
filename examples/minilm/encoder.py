"""The BERT encoder on rudnn kernels: NumPy arrays in, NumPy arrays out, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import rudnn

from .checkpoint import CheckpointError, Config
from .pooling import mean_pool

Array = Any  # a NumPy array, or a rudnn.Tensor where the encoder is on another device


@dataclass(frozen=True)
class Dense:
    """A linear layer whose weight is packed once for the kernel; bias f32 [out]."""

    weight: rudnn.nn.PackedWeight
    bias: Array

    def __call__(
        self, x: Array, activation: str | None = None, residual: Array | None = None
    ) -> Array:
        """Map x [..., in] to [..., out]; the activation comes first, then the residual."""
        return rudnn.nn.linear(x, self.weight, self.bias, activation=activation, residual=residual)


@dataclass(frozen=True)
class Norm:
    """A layer norm over the last axis; gamma and beta f32 [H]."""

    gamma: Array
    beta: Array
    epsilon: float

    def __call__(self, x: Array) -> Array:
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

    def __call__(self, x: Array, keep: Array) -> Array:
        """Map x [B, T, H] to its like; keep is bool [B, T]."""
        x = self.attention_norm(self.out(self._attend(x, keep), residual=x))
        hidden = self.up(x, activation=self.activation)
        return self.norm(self.down(hidden, residual=x))

    def _attend(self, x: Array, keep: Array) -> Array:
        batch, tokens, width = x.shape
        # Heads are views, [B, heads, T, D]: the kernel reads and writes strides, nothing is moved.
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        context = _empty_like(x, (batch, tokens, self.heads, width // self.heads))
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
    target
        Where to run: the weights are copied there. Raises DeviceError where there is no device.
    """

    def __init__(
        self, weights: Mapping[str, np.ndarray], config: Config, target: str = "llvm"
    ) -> None:
        self.device = rudnn.device(target)
        read = _Reader(weights, config, self.place)
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
        ids, keep = self.place(ids), self.place(keep)
        return np.asarray(mean_pool(self.hidden(ids, keep), keep))

    def place(self, array: np.ndarray) -> Array:
        """Return the array as it is on the host, else copied to the device."""
        if self.device == rudnn.device():
            return array
        return rudnn.tensor(array, device=self.device)

    def hidden(self, ids: Array, keep: Array) -> Array:
        """Return the last layer's token vectors, f32 [B, T, H]."""
        words = rudnn.nn.embedding(ids, self.words)
        x = self.norm(rudnn.nn.add(words, self.positions[: ids.shape[1]]))
        for layer in self.layers:
            x = layer(x, keep)
        return x


class _Reader:
    """Builds the layers from a checkpoint's names; a missing one is a `CheckpointError`."""

    def __init__(
        self, weights: Mapping[str, np.ndarray], config: Config, place: Callable[..., Array]
    ) -> None:
        self.weights, self.config, self.place = weights, config, place

    def __call__(self, *names: str) -> Array:
        """Return the tensors of these names, one below the other, where the encoder runs."""
        missing = next((n for n in names if n not in self.weights), None)
        if missing is not None:
            raise CheckpointError(f"the weights have no tensor {missing!r}")
        found = [self.weights[n] for n in names]
        return self.place(found[0] if len(found) == 1 else np.concatenate(found))

    def dense(self, *names: str) -> Dense:
        """Return one dense layer that stacks the outputs of those named."""
        weight = self(*(f"{name}.weight" for name in names))
        bias = self(*(f"{name}.bias" for name in names))
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


def _empty_like(x: Array, shape: tuple[int, ...]) -> Array:
    """Return an array of undefined f32 contents beside `x`."""
    if isinstance(x, np.ndarray):
        return np.empty(shape, np.float32)
    return rudnn.empty(shape, queue=x.queue)

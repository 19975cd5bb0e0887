"""The MiniLM example: real weights through rudnn kernels against the same encoder in torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minilm import checkpoint
from minilm.checkpoint import Checkpoint, CheckpointError
from minilm.encoder import Encoder

TOLERANCE = 1e-4
EXAMPLES = Path(__file__).parents[1] / "examples"
SENTENCES = [
    "Rain is expected in the north by the evening.",
    "Yes.",
    "The committee postponed its decision because two of its members could not attend, and it "
    "asked the applicants to hand in the missing documents before the end of next month.",
    "",
]


@pytest.fixture(scope="module")
def model() -> Checkpoint:
    return checkpoint.load(checkpoint.bundled_model())


@pytest.fixture(scope="module")
def encoder(model: Checkpoint) -> Encoder:
    return Encoder(model.weights, model.config)


def test_embeddings_equal_torchs(model: Checkpoint, encoder: Encoder) -> None:
    from minilm.reference import Reference

    ids, keep = model.tokenize(SENTENCES)
    ours = encoder(ids, keep)
    assert ours.shape == (len(SENTENCES), 384) and ours.dtype == np.float32
    theirs = Reference(model.weights, model.config)(ids, keep)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_embeddings_have_length_one(model: Checkpoint, encoder: Encoder) -> None:
    vectors = encoder(*model.tokenize(SENTENCES))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=0, atol=1e-6)


def test_padding_does_not_change_an_embedding(model: Checkpoint, encoder: Encoder) -> None:
    together = encoder(*model.tokenize(SENTENCES))
    alone = np.concatenate([encoder(*model.tokenize([sentence])) for sentence in SENTENCES])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)


def test_padding_tokens_have_no_influence(model: Checkpoint, encoder: Encoder) -> None:
    ids, keep = model.tokenize(SENTENCES)
    other = np.where(keep, ids, 2023)  # any real word in place of the padding token
    np.testing.assert_array_equal(encoder(ids, keep), encoder(other, keep))


def test_no_sentences_give_no_embeddings(model: Checkpoint, encoder: Encoder) -> None:
    assert encoder(np.empty((0, 7), np.int64), np.empty((0, 7), bool)).shape == (0, 384)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folder_without_a_file_is_one_clear_error(name: str, tmp_path: Path) -> None:
    _link_model(tmp_path, leave_out=name)
    with pytest.raises(CheckpointError, match=f"missing {name}$"):
        checkpoint.load(tmp_path)


def test_folder_without_any_file_names_them_all(tmp_path: Path) -> None:
    names = "config.json, tokenizer.json, model.safetensors"
    with pytest.raises(CheckpointError, match=f"missing {names}$"):
        checkpoint.load(tmp_path / "nowhere")


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    _link_model(tmp_path, leave_out="config.json")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match="needs model_type 'bert', got 'gpt2'"):
        checkpoint.load(tmp_path)


def test_truncated_weights_are_one_clear_error(tmp_path: Path) -> None:
    _link_model(tmp_path, leave_out="model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        checkpoint.load(tmp_path)


def test_weights_without_a_tensor_name_it(model: Checkpoint) -> None:
    name = "encoder.layer.5.output.dense.bias"
    weights = {key: array for key, array in model.weights.items() if key != name}
    with pytest.raises(CheckpointError, match=name):
        Encoder(weights, model.config)


def test_command_line_prints_neighbours_and_passes() -> None:
    done = _run("--pairs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nearest neighbour" in done.stdout and "greatest difference" in done.stdout


def test_command_line_refuses_an_empty_folder(tmp_path: Path) -> None:
    done = _run("--model", str(tmp_path))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "missing config.json" in done.stderr


def _link_model(folder: Path, leave_out: str) -> None:
    for file in checkpoint.bundled_model().iterdir():
        if file.is_file() and file.name != leave_out:
            if file.suffix == ".safetensors":
                (folder / file.name).symlink_to(file)
            else:
                shutil.copy(file, folder)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minilm", *arguments],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

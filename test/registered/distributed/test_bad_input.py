"""Bad input on the command line: a typed error with fact, cause and remedy, status 2, soon, and nothing left behind."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpkv.cli import demo_run
from cpkv.testing.checkpoints import write_hot_checkpoint
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=11, suite="distributed")

Run = Callable[..., Any]
SOON_S = 10.0
# Workers are threads here, so that what is only noticed by a worker is refused as fast as the rest.
SMALL = ("--transfer", "inprocess", "--page-size", "16", "--prompt-tokens", "300", "--cp-size", "2")


@pytest.fixture
def refused(cpkv: Run) -> Callable[..., str]:
    """Runs the demo, which must refuse; returns the message."""

    def call(*arguments: str) -> str:
        ended = cpkv("demo", "--json", *SMALL, *arguments)
        assert ended.status == 2, f"status {ended.status}: {ended.err}"
        assert ended.out == ""
        assert "Traceback" not in ended.err
        assert ended.seconds < SOON_S
        _, _, message = ended.err.partition("error: ")
        assert message.strip(), f"no message: {ended.err!r}"
        return message.strip()

    return call


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint, to be copied before it is damaged."""
    return write_hot_checkpoint(tmp_path_factory.mktemp("pristine"), "glm52")


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in pristine.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def change_config(folder: Path, **values: Any) -> None:
    """Set values of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cp-size", "0"), "cp_size is 0; it must be from 1 to 8"),
        (("--cp-size", "9"), "cp_size is 9; it must be from 1 to 8"),
        (("--page-size", "0"), "page_size is 0, which the inprocess back end does not take.*use 1 to 1024"),
        (("--page-size", "1025"), "page_size is 1025, which the inprocess back end does not take.*use 1 to 1024"),
        (("--chunk-size", "0"), "chunk_size is 0; it must be from 1 to"),
        (("--prompt-tokens", "0"), "--prompt-tokens is 0; give 1 to"),
        (("--prompt-tokens", "-5"), "--prompt-tokens is -5; give 1 to"),
        (("--requests", "0"), "--requests is 0; give 1 to 64"),
        (("--requests", "65"), "--requests is 65; give 1 to 64"),
        (("--max-new-tokens", "0"), "--max-new-tokens is 0; give 1 to 4096"),
        (("--seed", "-1"), "--seed is -1; give 0 to"),
        (("--num-pages", "7"), "num_pages is 7, no multiple of cp_size 2.*set --num-pages to 8"),
        (("--num-pages", "0"), "num_pages is 0, and 2 of them are reserved.*set --num-pages to 4 or more"),
        (("--num-pages", "-4"), "num_pages is -4, and 2 of them are reserved.*set --num-pages to 4 or more"),
        (
            ("--dtype", "float64", "--index-dtype", "fp8"),
            "rows of float64 with index keys of fp8.*choose.*bfloat16/fp8",
        ),
        (
            ("--dtype", "bfloat16", "--index-dtype", "float32"),
            "rows of bfloat16 with index keys of float32 do not exist",
        ),
        (
            ("--cp-size", "1", "--enable-cp-shared-kv"),
            "--enable-cp-shared-kv was given with cp_size 1.*leave the flag out",
        ),
        (("--cp-size", "1", "--no-current-reuse"), "--no-current-reuse.*the pool is replicated.*leave the option out"),
        (("--replicated", "--no-current-reuse"), "give --enable-cp-shared-kv too"),
    ],
)
def test_options_out_of_range(refused: Run, arguments: tuple[str, ...], words: str) -> None:
    assert re.search(words, refused(*arguments))


@pytest.mark.parametrize("arguments", [("--dtype", "float16"), ("--cp-size", "two"), ("--no-such-option",)])
def test_words_that_the_parser_does_not_know(cpkv: Run, arguments: tuple[str, ...]) -> None:
    ended = cpkv("demo", "--json", *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert arguments[0] in ended.err
    assert "Traceback" not in ended.err


def test_prompts_that_cannot_be_served(refused: Run, tmp_path: Path, checkpoint: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(b"")
    assert re.search("prompt file .* is empty; give at least one", refused("--prompt-file", str(prompt)))
    assert "cannot be read" in refused("--prompt-file", str(tmp_path / "nowhere.txt"))
    assert "cannot be read" in refused("--prompt-file", str(tmp_path))
    # 300 tokens are 19 pages of 16; with one trash page on each of two ranks 21, and as a multiple of two 22.
    message = refused("--num-pages", "8")
    assert "request-0 has 300 tokens and needs 19 pages, and the prefill pool holds 6" in message
    assert "raise --num-pages to 22, or shorten the prompt to 96 tokens" in message
    small = write_hot_checkpoint(tmp_path / "small", "glm5", vocab_size=100)
    prompt.write_bytes(bytes([1, 2, 200, 3]))
    message = refused("--model", str(small), "--prompt-file", str(prompt))
    assert "holds token id 200, and the model knows 0 to 99" in message
    change_config(checkpoint, max_position_embeddings=310)
    message = refused("--model", str(checkpoint))
    assert "300 + 16 tokens, and the model knows 310 positions; shorten the prompt to 294" in message


def test_prompts_are_checked_before_workers_are_started(refused: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "Cluster", None)
    assert "300 tokens" in refused("--num-pages", "8")


def test_folders_that_are_no_checkpoint(refused: Run, tmp_path: Path, checkpoint: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (tmp_path / "nowhere", empty, checkpoint / "config.json"):
        message = refused("--model", str(folder))
        assert f"{folder} is no checkpoint: it has no config.json; give a folder" in message
    (checkpoint / "model.safetensors").unlink()
    assert "holds no .safetensors file; give a folder with weights" in refused("--model", str(checkpoint))


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "glm4_moe", None])
def test_architectures_without_dsa(refused: Run, checkpoint: Path, model_type: str | None) -> None:
    change_config(checkpoint, model_type=model_type)
    message = refused("--model", str(checkpoint))
    assert f"model_type {model_type!r}, which is not supported" in message
    assert "glm_moe_dsa or deepseek_v32" in message


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"model_type": "glm_moe_dsa", "hidden_size": "many"}', "\0\xff", '{"model_type": []}'],
)
def test_config_files_that_are_no_configuration(refused: Run, checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refused("--model", str(checkpoint))


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": -1},
        {"num_hidden_layers": -1},
        {"indexer_types": ["shared", "full", "full", "full"]},
        {"kv_lora_rank": 32},
        pytest.param({"indexer_types": ["full", "full"]}, id="too few indexer types"),
        pytest.param({"vocab_size": 0}, id="no vocabulary"),
        pytest.param({"num_hidden_layers": None}, id="no number of layers"),
        pytest.param({"indexer_types": []}, id="no indexer types"),
        pytest.param({"num_key_value_heads": 0}, id="no heads"),
        pytest.param({"index_head_dim": 0}, id="no index dim"),
        pytest.param({"num_hidden_layers": 0, "indexer_types": None}, id="no layers"),
        pytest.param({"index_topk": 0}, id="no top-k"),
        pytest.param({"num_experts_per_tok": 0}, id="no experts"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(refused: Run, checkpoint: Path, values: dict[str, Any]) -> None:
    change_config(checkpoint, **values)
    message = refused("--model", str(checkpoint), "--prompt-tokens", "100")
    assert str(checkpoint) in message or "config.json" in message


def damaged_files(sound: bytes) -> dict[str, bytes]:
    """A safetensors file, broken in each way that a copy or a disk breaks one."""
    (length,) = struct.unpack("<Q", sound[:8])
    return {
        "empty": b"",
        "cut in the header": sound[: 8 + length // 2],
        "cut in the data": sound[: len(sound) - 1000],
        "no header length": b"\0" * 8 + sound[8:],
        "huge header length": b"\xff" * 8 + sound[8:],
        "header that is no JSON": sound[:8] + b"x" * length + sound[8 + length :],
        "pickled": b"\x80\x04}q\x00." + sound,
    }


def test_damaged_weight_files(refused: Run, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    for what, content in damaged_files(path.read_bytes()).items():
        path.write_bytes(content)
        message = refused("--model", str(checkpoint))
        assert f"{path} is damaged" in message, what
        assert "fetch the file again" in message, what


def test_weights_that_are_not_all_there(refused: Run, checkpoint: Path) -> None:
    change_config(checkpoint, num_hidden_layers=5, indexer_types=["full"] * 5)
    message = refused("--model", str(checkpoint))
    assert "lacks" in message
    assert "the first is model.layers.2.self_attn.indexer" in message
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    assert "model-00001-of-00002.safetensors is missing" in refused("--model", str(checkpoint))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"weight_map": 7}',
        "[]",
        '{"weight_map": {"lm_head.weight": 7}}',
    ],
)
def test_damaged_lists_of_weight_files(refused: Run, checkpoint: Path, text: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is damaged" in refused("--model", str(checkpoint))


def test_a_tensor_of_another_shape_is_named(refused: Run, checkpoint: Path) -> None:
    change_config(checkpoint, kv_lora_rank=32)
    message = refused("--model", str(checkpoint))
    assert "layers.0.self_attn.kv_a_layernorm.weight of shape [64], and config.json asks for [32]" in message


def test_a_damaged_tokenizer(refused: Run, checkpoint: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("hello")
    for text in ("{", "{}", '{"version": "1.0", "model": {"type": "None"}}'):
        (checkpoint / "tokenizer.json").write_text(text)
        message = refused("--model", str(checkpoint), "--prompt-file", str(prompt))
        assert "tokenizer" in message, text


def test_a_dump_folder_that_cannot_be_made(refused: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    message = refused("--dump", str(file / "dump"))
    assert "cannot be made" in message
    assert "give a folder that can be written" in message


def test_as_a_process(demo: Run, tmp_path: Path) -> None:
    running = demo("--json", "--model", str(tmp_path / "nowhere"))
    ended = running.end()
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.strip().startswith("error: ")
    assert len(ended.err.strip().splitlines()) == 1
    assert ended.seconds < SOON_S
    assert running.leftovers() == []

"""`cpkv plan`: its flags, its table and JSON, its plot, what it refuses, and that it needs no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cpkv.cache.capacity_planner import CapacityPlanner
from cpkv.cli.main import make_app
from cpkv.cli.sizes import parse_bytes, parse_tokens, show_bytes, show_tokens
from cpkv.config.settings import EngineSettings
from cpkv.errors import ConfigError
from cpkv.layout.model_numbers import model_presets
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit")

# Frozen: a flag that is added, renamed or dropped, or another default, is a change of the command that people use.
FLAGS: dict[str, Any] = {
    "model": None,
    "cp_size": 8,
    "context": None,
    "chunk_size": 8192,
    "page_size": 64,
    "kv_memory": "60GiB",
    "latent_dtype": "fp8",
    "index_dtype": "fp8",
    "kv_view": "auto",
    "scratch_bytes": None,
    "no_prefetch": False,
    "plot": None,
    "json_output": False,
}
SMALL = ("--kv-memory", "2GiB", "--context", "16K")


def test_flags_and_their_defaults() -> None:
    parameters = get_command(make_app()).commands["plan"].params  # type: ignore[attr-defined]
    assert {parameter.name: parameter.default for parameter in parameters} == FLAGS


def test_help_can_be_read_on_80_columns() -> None:
    shown = CliRunner().invoke(make_app(), ["plan", "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert shown.exit_code == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and max(map(len, text.splitlines())) <= 80
    for word in ("MODEL", "glm-5.2", "--kv-memory", "--plot", "--json", "Ranks and pool", "Views", "cpkv plan glm-5.2"):
        assert word in text


def test_json_is_the_plan(cpkv: Any) -> None:
    status, out, err = cpkv("plan", "glm-5.2", "--json", *SMALL, "--context", "1M")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told.pop("model_name") == "glm-5.2"
    settings = EngineSettings(
        num_pages=1,
        enable_cp_shared_kv=True,
        cp_size=8,
        chunk_size=8192,
        dtype="bfloat16",
        latent_dtype="fp8",
        index_dtype="fp8",
    )
    expected = CapacityPlanner(model_presets()["glm-5.2"], settings, 2 << 30).report((16384, 1 << 20))
    assert told == json.loads(msgspec.json.encode(expected))


def test_the_table_has_the_same_numbers(cpkv: Any) -> None:
    told = json.loads(cpkv("plan", "glm-5.2", "--json", *SMALL)[1])
    status, text, _ = cpkv("plan", "glm-5.2", *SMALL)
    assert status == 0
    assert "78 layers, 21 of them with an indexer" in text and "53,940 B" in text and "3,452,160 B" in text
    for capacity in (told["replicated"], told["shared"]):
        assert f"{capacity['tokens']:,} tokens in {capacity['pages']:,} pages" in text
    for view in told["contexts"][0]["views"]:
        (line,) = [line for line in text.splitlines() if re.search(rf"│ {view['view']}( \(\d\))* +│", line)]
        assert show_bytes(view["scratch_bytes"]) in line
        if view["view"] != "current":
            assert f"{view['capacity']['tokens']:,}" in line and f"{view['capacity_ratio']:.3f}" in line
            assert not view["moved_bytes"] or show_bytes(view["moved_bytes"]) in line
    assert "ranks on one host: unified: the ranks share memory" in text
    assert "ranks on several hosts: mixed: the history is gathered" in text


def test_the_table_says_what_would_be_refused(cpkv: Any) -> None:
    words = ("plan", "glm-5", "--context", "1M", "--kv-memory", "2GiB", "--scratch-bytes", "64KiB")
    text = " ".join(cpkv(*words)[1].split())
    assert "(2) fewer tokens than the request has" in text and "(3) more than --scratch-bytes" in text
    assert "refused: request of 1048576 tokens" in text
    assert "longer than the model's 202,752 positions" in text


def test_a_folder_and_a_file_are_read(cpkv: Any, tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "max_position_embeddings": 163840,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plans = [
        json.loads(cpkv("plan", model, "--json", *SMALL)[1])
        for model in (str(tmp_path), str(tmp_path / "config.json"), "deepseek-v3.2")
    ]
    for plan in plans:
        del plan["model_name"]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_rows_of_other_dtypes(cpkv: Any, dtype: str) -> None:
    index = "float64" if dtype == "float64" else "fp8"
    status, out, _ = cpkv("plan", "glm-5", "--json", *SMALL, "--dtype", dtype, "--index-dtype", index)
    assert status == 0
    size = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    assert json.loads(out)["latent_row_bytes"] == 576 * size


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("no-such-model",), "give a folder with a config.json, a config.json, or one of deepseek-v3.2, glm-5"),
        (("FOLDER",), "config.json does not exist; give"),
        (("FOLDER/broken.json",), "is no JSON"),
        (("FOLDER/other.json",), "has no DeepSeek Sparse Attention; use a model of type"),
        (("glm-5", "--cp-size", "0"), "cp_size is 0; it must be from 1 to 8"),
        (("glm-5", "--cp-size", "1", "--kv-view", "full"), "the pool is replicated"),
        (("glm-5", "--context", "0"), "write it like 1M, 128K or 8192"),
        (("glm-5", "--context", "32M"), "it must be from 1 to 16777216"),
        (("glm-5", "--context", "many"), "write it like 1M, 128K or 8192"),
        (("glm-5", "--kv-memory", "1MiB"), "raise it to that or more"),
        (("glm-5", "--kv-memory", "60G"), "write it like 60GiB"),
        (("glm-5", "--scratch-bytes", "0"), "write it like 60GiB"),
        (("glm-5", "--index-dtype", "float64", "--dtype", "bfloat16"), "choose dtype/index_dtype from"),
        (("glm-5", "--plot", "FOLDER/plot.pdf"), "give a name that ends in .png"),
        (("glm-5", *SMALL, "--plot", "FOLDER/none/plot.png"), "give another path"),
    ],
)
def test_odd_input_ends_with_status_2_and_one_line(
    cpkv: Any, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"model_type": "llama"}')
    status, out, err = cpkv("plan", *(word.replace("FOLDER", str(tmp_path)) for word in words))
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and told in err


@pytest.mark.parametrize("words", [(), ("--kv-view", "blocked"), ("--cp-size", "1"), ("--kv-memory", "10MiB")])
def test_the_plot_is_a_picture(cpkv: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    path = tmp_path / "plan.png"
    status, out, err = cpkv("plan", "glm-5.2", *SMALL, "--json", "--plot", str(path), *words)
    assert status == 0 and json.loads(out) and err == f"plot written to {path}\n"
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000


def test_without_matplotlib_the_extra_is_named(cpkv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    status, _, err = cpkv("plan", "glm-5.2", *SMALL, "--plot", str(tmp_path / "plan.png"))
    assert status == 2 and "pip install cpkv[plot]" in err and err.count("\n") == 1


CODE = """
import sys
for name in ("torch", "transformers", "safetensors", "mooncake"):
    sys.modules[name] = None  # an import of it fails
from cpkv.cli.main import run
sys.argv = ["cpkv", *sys.argv[1:]]
try:
    run()
finally:
    print("matplotlib" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("words", [("plan", "glm-5.2", *SMALL, "--json"), ("--help",)])
def test_no_torch_is_needed_and_no_matplotlib_loaded(words: tuple[str, ...]) -> None:
    ran = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == "False\n" and ran.stdout


# Sizes.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60GiB", 60 << 30),
        ("60 gib", 60 << 30),
        ("1.5MiB", 3 << 19),
        ("80GB", 80 * 10**9),
        ("2TiB", 2 << 40),
        ("65536", 65536),
        ("65_536B", 65536),
        ("0.3KiB", 307),
    ],
)
def test_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text, "--kv-memory") == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "60G", "-1GiB", "0", "0.1B", "1e9", "60GiB x", "nan", "9" * 30, "\u0663GiB"]
)
def test_no_bytes(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory is .*write it like 60GiB"):
        parse_bytes(text, "--kv-memory")


@pytest.mark.parametrize(("text", "expected"), [("1M", 1 << 20), ("128k", 1 << 17), ("1.5K", 1536), ("1000", 1000)])
def test_tokens(text: str, expected: int) -> None:
    assert parse_tokens(text, "--context") == expected


@pytest.mark.parametrize("text", ["", "M", "0", "-5", "1.5", "0.0001K", "1MiB", "1 0"])
def test_no_tokens(text: str) -> None:
    with pytest.raises(ConfigError, match="--context is .*write it like 1M"):
        parse_tokens(text, "--context")


def test_sizes_are_shown_as_they_are_written() -> None:
    shown = [show_bytes(size) for size in (0, 1023, 1024, 3 << 19, 60 << 30, 5 << 40)]
    assert shown == ["0 B", "1023 B", "1.00 KiB", "1.50 MiB", "60.00 GiB", "5.00 TiB"]
    assert [show_tokens(tokens) for tokens in (0, 1000, 1 << 17, 1 << 20, 3 << 19)] == [
        "0",
        "1000",
        "128K",
        "1M",
        "1536K",
    ]

"""`cpkv demo --json`: on real processes once, then in threads of this process over the options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cpkv.cli import demo_run
from cpkv.engine.generation import GenerationResult
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.checkpoints import write_hot_checkpoint
from cpkv.testing.reference import ReferenceModel
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=26, suite="distributed")

Run = Callable[..., Any]

# The object that the command promises, key by key.
SCHEMA: dict[str, type | tuple[type, ...]] = {
    "tokens": list,
    "tokens_replicated": list,
    "tokens_reference": (list, type(None)),
    "tokens_equal": bool,
    "max_logit_diff_reference": (float, type(None)),
    "bitwise_equal_replicated": bool,
    "recall_right": int,
    "recall_asked": int,
    "kv_bytes_per_rank": int,
    "kv_bytes_per_rank_replicated": int,
    "capacity_ratio": float,
    "scratch_bytes_per_rank": int,
    "views": dict,
    "gathered_bytes": int,
    "sent_pages_per_rank": list,
    "sent_bytes_per_rank": list,
    "seconds": dict,
    "config": dict,
}
SMALL = ("--transfer", "inprocess", "--page-size", "16", "--prompt-tokens", "250", "--max-new-tokens", "5")


def checked(out: str) -> dict[str, Any]:
    """The JSON object that stdout is, its keys and types checked, and what must hold in any run."""
    report: dict[str, Any] = json.loads(out)
    assert out.count("\n") == 1, "stdout holds more than one line"
    assert list(report) == list(SCHEMA)
    for key, kinds in SCHEMA.items():
        assert isinstance(report[key], kinds), f"{key} is {report[key]!r}"
        assert isinstance(report[key], bool) == (kinds is bool), f"{key} is {report[key]!r}"
    config = report["config"]
    new = config["max_new_tokens"]
    assert [len(tokens) for tokens in report["tokens"]] == [new] * config["requests"]
    assert report["bitwise_equal_replicated"] is True
    assert report["tokens_replicated"] == report["tokens"]
    assert report["tokens_equal"] is True
    assert report["recall_right"] == report["recall_asked"]
    check_bytes(report)
    return report


def check_bytes(report: dict[str, Any]) -> None:
    """Sent, held and gathered bytes fit together, whatever a page weighs."""
    config, pages = report["config"], report["sent_pages_per_rank"]
    cp_size = config["cp_size"]
    assert len(pages) == len(report["sent_bytes_per_rank"]) == cp_size
    page_bytes, rest = divmod(sum(report["sent_bytes_per_rank"]), sum(pages))
    assert rest == 0
    assert report["sent_bytes_per_rank"] == [count * page_bytes for count in pages]
    shared = config["enable_cp_shared_kv"]
    logical = config["num_pages"] - cp_size
    # One trash page a rank; the rest is one copy over the ranks, or one on each.
    assert report["kv_bytes_per_rank_replicated"] == (logical + 1) * page_bytes
    held = cp_size * report["kv_bytes_per_rank"]
    assert held == (logical + cp_size if shared else cp_size * (logical + 1)) * page_bytes
    assert report["capacity_ratio"] == (cp_size if shared else 1)
    assert report["gathered_bytes"] % page_bytes == 0
    assert report["scratch_bytes_per_rank"] > 0


def pages_of(report: dict[str, Any], lengths: list[int]) -> int:
    return sum(-(-length // report["config"]["page_size"]) for length in lengths)


@pytest.fixture
def small(cpkv: Run) -> Callable[..., dict[str, Any]]:
    """A small run in threads that must succeed; returns its JSON."""

    def call(*arguments: str) -> dict[str, Any]:
        ended = cpkv("demo", "--json", *SMALL, *arguments)
        assert ended.status == 0, ended.err
        return checked(ended.out)

    return call


def test_on_processes(demo: Run, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    running = demo(
        *("--cp-size", "2", "--prompt-tokens", "260", "--chunk-size", "100", "--page-size", "32", "--requests", "2"),
        *("--max-new-tokens", "6", "--dump", str(dump), "--json"),
    )
    running.wait_for_worker("decode worker")
    ended = running.end()
    assert ended.status == 0, ended.err
    report = checked(ended.out)
    assert running.leftovers() == []
    assert set(running.workers) == {"prefill rank 0", "prefill rank 1", "decode worker"}
    phases = ["starting 2 prefill ranks", "shared: prefill", "shared: decode", "replicated: prefill", "reference: "]
    places = [ended.err.index(phase) for phase in phases]
    assert places == sorted(places)
    assert report["config"]["transfer"] == "mooncake"
    assert report["config"]["model_family"] == "glm5"
    assert report["recall_asked"] == 12
    assert report["tokens_reference"] == report["tokens"]
    assert report["max_logit_diff_reference"] <= 1e-4
    # 260 and 195 tokens in batches of 100: only the first has no history.
    assert report["views"] == {"current": 1, "unified": 4}
    assert sum(report["sent_pages_per_rank"]) == pages_of(report, [260, 195])
    assert max(report["sent_pages_per_rank"]) - min(report["sent_pages_per_rank"]) <= 2
    assert load_file(dump / "logits.safetensors")["prompt_ids.request-1"].shape == (195,)
    assert (dump / "checkpoint" / "config.json").is_file()


def test_one_rank_shares_with_nobody(small: Run) -> None:
    report = small("--cp-size", "1")
    assert report["config"]["enable_cp_shared_kv"] is False
    assert report["views"] == {"replicated": 1}
    assert report["gathered_bytes"] == 0
    assert report["kv_bytes_per_rank"] == report["kv_bytes_per_rank_replicated"]


def test_several_requests_in_chunks(small: Run) -> None:
    report = small("--cp-size", "3", "--requests", "3", "--chunk-size", "77", "--cp-strategy", "interleave")
    lengths = [250, 209, 167]
    assert sum(report["sent_pages_per_rank"]) == pages_of(report, lengths)
    assert len({tuple(tokens) for tokens in report["tokens"]}) == 3
    assert report["recall_asked"] == 15


def test_history_is_counted_and_only_history(small: Run) -> None:
    report = small("--cp-size", "2", "--chunk-size", "100", "--kv-view", "mixed")
    assert report["views"] == {"mixed": 3}
    page_bytes = report["sent_bytes_per_rank"][0] // report["sent_pages_per_rank"][0]
    # Batches start at 0, 100 and 200: 0, 7 and 13 pages of 16 hold history.
    assert report["gathered_bytes"] == 20 * page_bytes


def test_current_reuse_can_be_turned_off(small: Run) -> None:
    with_reuse, without = small("--cp-size", "2"), small("--cp-size", "2", "--no-current-reuse")
    assert with_reuse["views"] == {"current": 1}
    assert without["views"] == {"unified": 1}
    assert without["gathered_bytes"] == 0
    assert without["tokens"] == with_reuse["tokens"]
    assert without["scratch_bytes_per_rank"] > with_reuse["scratch_bytes_per_rank"]


@pytest.mark.parametrize("family", ["glm52", "deepseek-v32"])
def test_other_families(small: Run, family: str) -> None:
    report = small("--cp-size", "2", "--model-family", family, "--chunk-size", "120")
    assert report["recall_asked"] == 5


@pytest.mark.parametrize(("dtype", "index_dtype"), [("float32", "fp8"), ("bfloat16", "bfloat16"), ("bfloat16", "fp8")])
def test_formats_without_a_reference(small: Run, dtype: str, index_dtype: str) -> None:
    report = small("--cp-size", "2", "--chunk-size", "100", "--dtype", dtype, "--index-dtype", index_dtype)
    assert report["tokens_reference"] is None
    assert report["max_logit_diff_reference"] is None


def test_a_prompt_file_is_taken_as_bytes_by_the_hot_model(small: Run, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_bytes(bytes(range(256)) * 2)
    report = small("--cp-size", "2", "--prompt-file", str(text), "--chunk-size", "300")
    assert report["recall_asked"] == report["recall_right"] == 0
    assert sum(report["sent_pages_per_rank"]) == 512 // 16
    assert report["max_logit_diff_reference"] <= 1e-4
    assert report["config"]["prompt_file"] == str(text)


def test_a_given_checkpoint_is_served(small: Run, tmp_path: Path) -> None:
    folder = write_hot_checkpoint(tmp_path / "given", "deepseek-v32", index_heads=4, seed=5)
    report = small("--cp-size", "2", "--model", str(folder))
    assert report["recall_asked"] == 0
    assert report["config"]["model"] == str(folder)
    assert report["max_logit_diff_reference"] <= 1e-4


def test_a_prompt_too_short_for_recall_is_served_by_the_hot_model(small: Run) -> None:
    report = small("--cp-size", "4", "--prompt-tokens", "3", "--requests", "2")
    assert report["recall_asked"] == 0
    assert sum(report["sent_pages_per_rank"]) == 2


def test_diagnostics_warn_and_change_nothing(cpkv: Run, small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = small("--cp-size", "2", "--chunk-size", "100")
    monkeypatch.setenv("CPKV_DEBUG_SHARED_KV", "1")
    ended = cpkv("demo", "--json", *SMALL, "--cp-size", "2", "--chunk-size", "100")
    assert ended.status == 0, ended.err
    assert "warning: CPKV_DEBUG_SHARED_KV is set" in ended.err
    diagnosed = checked(ended.out)
    assert diagnosed["config"]["debug"] is True
    assert plain["config"]["debug"] is False
    changing = ("seconds", "config")
    assert {key: diagnosed[key] for key in SCHEMA if key not in changing} == {
        key: plain[key] for key in SCHEMA if key not in changing
    }


def test_people_get_a_table(cpkv: Run) -> None:
    ended = cpkv("demo", *SMALL, "--cp-size", "2")
    assert ended.status == 0, ended.err
    with pytest.raises(json.JSONDecodeError):
        json.loads(ended.out)
    for words in ("answers right", "5 of 5", "equal to replicated", "capacity for these bytes", "pages sent by rank"):
        assert words in ended.out


class Dump:
    """What `--dump` left: everything that is needed to compute the run again."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder / "checkpoint"
        self.logits = load_file(folder / "logits.safetensors")
        self.pool = load_file(folder / "decode_pool.safetensors")

    def latent_rows(self, request: str, layer: int) -> torch.Tensor:
        """The stored rows of a request's tokens, found through its page table: [tokens, values]."""
        return self._rows("latent", request, layer)

    def index_rows(self, request: str, slot: int) -> torch.Tensor:
        """The stored index keys of a request's tokens: [tokens, values]."""
        return self._rows("index_keys", request, slot)

    def _rows(self, part: str, request: str, layer: int) -> torch.Tensor:
        pages = self.pool[part][self.pool[f"page_table.{request}"], layer]
        return pages.flatten(0, 1)[: int(self.pool[f"stored_tokens.{request}"])]


FLOAT64 = ("--dtype", "float64", "--cp-size", "3", "--chunk-size", "90", "--requests", "2", "--prompt-tokens", "200")


def test_a_dump_can_be_computed_again(small: Run, tmp_path: Path) -> None:
    # Index slots that differ from the numbers of their layers.
    types = ("full", "shared", "full", "shared")
    folder = write_hot_checkpoint(tmp_path / "given", "glm52", indexer_types=types)
    report = small(*FLOAT64, "--model", str(folder), "--dump", str(tmp_path / "dump"))
    assert report["max_logit_diff_reference"] <= 1e-9
    dump = Dump(tmp_path / "dump")
    model = ReferenceModel(dump.checkpoint)
    for number, request in enumerate(("request-0", "request-1")):
        prompt = dump.logits[f"prompt_ids.{request}"].tolist()
        tokens = dump.logits[f"new_tokens.{request}"].tolist()
        assert tokens == report["tokens"][number]
        stored: dict[str, torch.Tensor] = {}
        logits, _ = model._run([*prompt, *tokens[:-1]], stored)
        ours = torch.cat([dump.logits[f"prompt_logits.{request}"][:-1], dump.logits[f"decoded_logits.{request}"]])
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, logits, rtol=0, atol=1e-9)
        check_rows(dump, request, stored)
    used = torch.cat([dump.pool[f"page_table.request-{number}"] for number in range(2)]).tolist()
    assert len(set(used)) == len(used), "two requests share a page"
    assert used != sorted(used), "the decode worker's pages must not be in order, or the page table proves nothing"


def check_rows(dump: Dump, request: str, stored: dict[str, torch.Tensor]) -> None:
    """Rows that the reference would store, layer by layer, against the dumped pool."""
    latent = [rows for name, rows in stored.items() if name.endswith("self_attn.rows")]
    index = [keys for name, keys in stored.items() if name.endswith("indexer.keys")]
    assert (len(latent), len(index)) == (dump.pool["latent"].shape[1], dump.pool["index_keys"].shape[1])
    for layer, rows in enumerate(latent):
        ours = dump.latent_rows(request, layer)
        torch.testing.assert_close(ours, rows, rtol=0, atol=1e-9, msg=lambda text, at=layer: f"layer {at}: {text}")
    for slot, keys in enumerate(index):
        ours = dump.index_rows(request, slot)
        torch.testing.assert_close(ours, keys, rtol=0, atol=1e-9, msg=lambda text, at=slot: f"slot {at}: {text}")


def test_shared_and_replicated_dumps_hold_the_same_bits(small: Run, tmp_path: Path) -> None:
    small(*FLOAT64, "--dump", str(tmp_path / "shared"))
    small(*FLOAT64, "--replicated", "--dump", str(tmp_path / "replicated"))
    shared, replicated = Dump(tmp_path / "shared"), Dump(tmp_path / "replicated")
    assert shared.logits.keys() == replicated.logits.keys()
    for name, values in shared.logits.items():
        assert_same_bits(values, replicated.logits[name], name)
    for request in ("request-0", "request-1"):
        for layer in range(shared.pool["latent"].shape[1]):
            rows = shared.latent_rows(request, layer), replicated.latent_rows(request, layer)
            assert_same_bits(*rows, f"latent rows of {request}, layer {layer}")


def test_one_bit_that_differs_ends_with_status_1(cpkv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo_run.generate

    def flip(*arguments: Any, shared: bool, **options: Any) -> GenerationResult:
        result = honest(*arguments, shared=shared, **options)
        if shared:
            return result
        logits = {name: values.clone() for name, values in result.logits.items()}
        logits["request-0"].view(torch.uint8)[-1, 0] ^= 1
        return dataclasses.replace(result, logits=logits)

    monkeypatch.setattr(demo_run, "generate", flip)
    ended = cpkv("demo", "--json", *SMALL, "--cp-size", "2")
    assert ended.status == 1
    assert json.loads(ended.out)["bitwise_equal_replicated"] is False
    assert "difference: the shared run differs from the replicated run" in ended.err

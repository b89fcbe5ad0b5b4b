"""Messages are plain data: what is sent is what is read, and nothing else is read."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from cpkv.protocol import messages as m
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")

POOL = m.PoolDescription(
    protocol_version=1,
    model="glm_moe_dsa",
    num_layers=3,
    index_slots=(0, -1, 1),
    page_size=64,
    latent_row_bytes=1152,
    index_row_bytes=132,
    latent_dtype="bfloat16",
    index_dtype="fp8",
    norm_eps=1e-5,
    latent_norm_eps=1e-6,
    transfer="mooncake",
)
OTHER = m.PoolDescription(
    protocol_version=2,
    model="deepseek_v32",
    num_layers=61,
    index_slots=(0, 1, 2),
    page_size=16,
    latent_row_bytes=2304,
    index_row_bytes=256,
    latent_dtype="float32",
    index_dtype="bfloat16",
    norm_eps=1e-6,
    latent_norm_eps=1e-5,
    transfer="inprocess",
)
TO_DECODE = (
    m.Hello(POOL, m.SenderDescription(rank=-1, cp_size=4, strategy="interleave", instance="5f3a")),
    m.OpenTransfer("r1", 2, 4000, 16, (0, 3, 1), m.Sampling(0.7, 0.95, 12)),
    m.PagesSent("r1", 2, 3, 17, (1, 5), ("ab", "cd")),
    m.FinishTransfer("r1", 2, 154_879),
    m.AbortTransfer("r1", 2, "rank 3 \N{SKULL} failed", writes_may_land=True),
    m.WritesDrained("r1", 2),
    m.Heartbeat(),
    m.DecodeStep(("r1", "r2")),
    m.RowDigest("r1"),
    m.ReleaseRequest("r1"),
)
FROM_DECODE = (
    m.Welcome(POOL, 15.0),
    m.TransferOpened(
        "r1",
        2,
        (0, 2),
        (7, 9),
        (m.TransferTarget("127.0.0.1:1", (m.MemoryRegion(2**47 - 1, 2**40), m.MemoryRegion(1, 0))),),
    ),
    m.PagesTaken("r1", 2, 17, (5,)),
    m.TransferComplete("r1", 2),
    m.DecodedTokens((5, 6), (bytes(range(256)), b"")),
    m.RowDigestIs("ab"),
    m.Done(),
    m.Failed("TransferError", "fact, cause, remedy", "decode worker"),
)


def name(message: Any) -> str:
    return type(message).__name__


def test_the_samples_below_are_all_messages_there_are() -> None:
    assert {type(message) for message in TO_DECODE} == set(get_args(m.ToDecode))
    assert {type(message) for message in FROM_DECODE} == set(get_args(m.FromDecode))


def test_each_question_has_one_answer() -> None:
    assert set(m.ANSWER_OF) == set(get_args(m.ToDecode))
    assert set(m.ANSWER_OF.values()) == set(get_args(m.FromDecode)) - {m.Failed}


@pytest.mark.parametrize("message", TO_DECODE + FROM_DECODE, ids=name)
def test_what_is_sent_is_what_is_read(message: Any) -> None:
    accepts = m.ToDecode if message in TO_DECODE else m.FromDecode
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=accepts)
    assert type(received) is type(message)
    assert received == message


@pytest.mark.parametrize("message", TO_DECODE + FROM_DECODE, ids=name)
def test_a_message_in_the_wrong_direction_is_refused(message: Any) -> None:
    accepts = m.FromDecode if message in TO_DECODE else m.ToDecode
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=accepts)


@pytest.mark.parametrize("message", TO_DECODE + FROM_DECODE, ids=name)
def test_a_message_with_a_field_missing_or_of_another_type_is_refused(message: Any) -> None:
    accepts = m.ToDecode if message in TO_DECODE else m.FromDecode
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    required = [field.encode_name for field in msgspec.structs.fields(message) if field.required]
    for field in required:
        without = {key: value for key, value in plain.items() if key != field}
        for broken in (without, {**plain, field: [{"no": "such"}]}):
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(msgspec.msgpack.encode(broken), type=accepts)
    for tag in ("", "object", "Exec", 7):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode({**plain, "type": tag}), type=accepts)


def test_equal_pools_have_no_mismatch() -> None:
    same = msgspec.msgpack.decode(msgspec.msgpack.encode(POOL), type=m.PoolDescription)
    assert m.describe_mismatch(POOL, same) == ""


@pytest.mark.parametrize("field", m.PoolDescription.__struct_fields__)
def test_a_mismatch_names_the_field_and_both_values(field: str) -> None:
    """The handshake: version, model, layers, slots, page size, row bytes, dtypes, both eps and the back end."""
    theirs = msgspec.structs.replace(POOL, **{field: getattr(OTHER, field)})
    said = f"{field}: prefill has {getattr(OTHER, field)!r}, decode has {getattr(POOL, field)!r}"
    assert m.describe_mismatch(POOL, theirs) == said


def test_several_mismatches_are_all_named() -> None:
    parts = m.describe_mismatch(POOL, OTHER).split("; ")
    assert [part.partition(":")[0] for part in parts] == list(m.PoolDescription.__struct_fields__)


def test_everything_that_decides_what_a_byte_means_is_compared() -> None:
    compared = {
        "protocol_version", "model", "num_layers", "index_slots", "page_size", "latent_row_bytes", "index_row_bytes",
        "latent_dtype", "index_dtype", "norm_eps", "latent_norm_eps",
    }  # fmt: skip
    assert compared <= set(m.PoolDescription.__struct_fields__)
    # cp_size and split are carried, not compared: any prefill group may feed any decode worker.
    assert not {"cp_size", "strategy", "rank"} & set(m.PoolDescription.__struct_fields__)
    assert {"cp_size", "strategy"} <= set(m.SenderDescription.__struct_fields__)

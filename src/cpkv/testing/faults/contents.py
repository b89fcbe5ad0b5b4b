"""What pages hold: bytes that follow from one number per try of a request, so that both ends know every one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from cpkv.engine.pool_description import describe_geometry
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.row_format import RowFormat
from cpkv.pool.page_pool import POISON_BYTE, PagePool
from cpkv.protocol.messages import PoolDescription

# Latent and index parts differ in size, so that nothing can be right with the offsets of the other.
ROW_FORMAT = RowFormat("float32", kv_lora_rank=184, rope_dim=8, index_dtype="float32", index_dim=64)
SLOTS = (0, -1, 1)
VOCAB_SIZE = 1000


def seeded_geometry(page_size: int) -> PoolGeometry:
    """A small page: 3 layers, 2 of them with an indexer; 44 KiB at 16 tokens."""
    return PoolGeometry(ROW_FORMAT, page_size, SLOTS)


def seeded_description(page_size: int, transfer: str) -> PoolDescription:
    """What both ends say about such pages."""
    geometry = seeded_geometry(page_size)
    return describe_geometry("seeded pages", geometry, transfer, norm_eps=1e-6, latent_norm_eps=1e-6)


def content_seed(run_seed: int, request_id: str, attempt: int, instance: str) -> int:
    """The number that a request's bytes follow from; another one for each try, and for each life of the prefill."""
    text = f"{run_seed} {request_id} {attempt} {instance}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def page_bytes(seed: int, position: int, num_bytes: int) -> np.ndarray:
    """The bytes uint8 [num_bytes] of one page, latent part first; none of its words is poison but by chance."""
    start = int.from_bytes(hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest(), "little")
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(start)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(32)
    return words.view(np.uint8)[:num_bytes]


def _parts(pool: PagePool, local_page: int) -> tuple[np.ndarray, np.ndarray]:
    return pool.latent[local_page].view(-1).numpy(), pool.index[local_page].view(-1).numpy()


def fill_page(pool: PagePool, local_page: int, seed: int, position: int) -> None:
    """Write a page: what the forward pass would do."""
    latent, index = _parts(pool, local_page)
    content = page_bytes(seed, position, len(latent) + len(index))
    latent[:] = content[: len(latent)]
    index[:] = content[len(latent) :]


def wrong_bytes(pool: PagePool, local_page: int, seed: int, position: int) -> str:
    """Which bytes of a page are not as they should be, in words; empty when all are right."""
    latent, index = _parts(pool, local_page)
    content = page_bytes(seed, position, len(latent) + len(index))
    found = np.concatenate([latent, index])
    wrong = np.flatnonzero(found != content)
    if not len(wrong):
        return ""
    first = int(wrong[0])
    poison = " (poison)" if bool((found[wrong] == POISON_BYTE).all()) else ""
    return (
        f"position {position}, local page {local_page}: {len(wrong)} of {len(content)} bytes are wrong{poison}, the "
        f"first at {first}: {found[first]} instead of {content[first]}"
    )


def is_poison(pool: PagePool, local_page: int) -> bool:
    """Whether nobody has written to a page since it was freed."""
    return all(bool((part == POISON_BYTE).all()) for part in _parts(pool, local_page))


def prompt_digest(pages: Iterable[np.ndarray]) -> str:
    """SHA-256 over the pages of a prompt, by position."""
    digest = hashlib.sha256()
    for page in pages:
        digest.update(page.tobytes())
    return digest.hexdigest()


def stored_digest(pages: Iterable[tuple[PagePool, int]]) -> str:
    """The same over pages as they lie."""
    return prompt_digest(np.concatenate(_parts(pool, local_page)) for pool, local_page in pages)


def expected_digest(geometry: PoolGeometry, seed: int, pages: int) -> str:
    """The same as it must be."""
    return prompt_digest(page_bytes(seed, position, geometry.page_bytes) for position in range(pages))

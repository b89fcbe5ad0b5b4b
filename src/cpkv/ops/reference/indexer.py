"""The scores of the indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556).

score(q, k) = sum over heads h of  w_h * relu(q_h . k)          w already holds heads^-0.5 * dim^-0.5
"""

from __future__ import annotations

import torch

from cpkv.config.names import IndexDtype
from cpkv.layout.query_blocks import KEY_TILE
from cpkv.layout.row_format import FP8_SCALE_BYTES
from cpkv.ops.reference.index_keys import decode_index_keys, unpack_keys_and_scales


def indexer_scores(
    queries: torch.Tensor, weights: torch.Tensor, stored: torch.Tensor, limits: torch.Tensor, *, dtype: IndexDtype
) -> torch.Tensor:
    """Score a block of queries against every key that one of them may see.

    Keys are decoded and read in tiles of a fixed, zero-padded shape in position order, so no shape and no rounding
    depends on where the keys came from or on how many lie beside them.

    Args:
        queries: [queries, heads, dim].
        weights: [queries, heads], may be negative.
        stored: uint8 [tokens, index_row_bytes] stored keys in position order, at least max(limits) of them; or the
            same keys decoded already, [tokens, dim] in the dtype of the queries.
        limits: int64 [queries] how many keys, from the first of `stored` on, each query may see; one sees at least 1.
        dtype: of the stored keys.

    Returns:
        [queries, max(limits)] scores; -inf where a query may not look.
    """
    num_queries, heads, dim = queries.shape
    width = int(limits.max())
    flat_queries = queries.reshape(num_queries * heads, dim)
    scores = queries.new_empty(num_queries, -(-width // KEY_TILE) * KEY_TILE)
    for start in range(0, width, KEY_TILE):
        tile = stored[start : start + KEY_TILE]
        if not stored.is_floating_point():
            tile = decode_index_keys(tile, dtype, queries.dtype)
        if tile.shape[0] < KEY_TILE:
            tile = torch.cat([tile, tile.new_zeros(KEY_TILE - tile.shape[0], dim)])
        products = torch.mm(flat_queries, tile.T).relu_().view(num_queries, heads, KEY_TILE)
        torch.bmm(weights.unsqueeze(1), products, out=scores[:, start : start + KEY_TILE].unsqueeze(1))
    scores = scores[:, :width]
    hidden = torch.arange(width, device=scores.device) >= limits.unsqueeze(1)
    return scores.masked_fill_(hidden, float("-inf"))


def fp8_indexer_scores(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_scales: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """Score queries against every key that one of them may see, by fp32 products of the decoded values.

    Args:
        queries: float8_e4m3fn [queries, heads, dim].
        weights: fp32 [queries, heads], may be negative; each holds the scale of its quantised query.
        keys: float8_e4m3fn [tokens, dim] in position order.
        key_scales: fp32 [tokens].
        limits: int64 [queries] how many keys, from the first on, each query may see; at most `tokens`.

    Returns:
        fp32 [queries, tokens]; -inf where a query may not look.
    """
    num_queries, heads, dim = queries.shape
    tokens = len(keys)
    scores = torch.full((num_queries, tokens), float("-inf"), dtype=torch.float32, device=queries.device)
    flat_queries = queries.to(torch.float32).view(num_queries * heads, dim)
    # A tile of keys at a time: never products of every head with a whole context.
    for start in range(0, max(limits.tolist(), default=0), KEY_TILE):
        tile = slice(start, start + KEY_TILE)
        products = torch.mm(flat_queries, keys[tile].to(torch.float32).T).relu_().view(num_queries, heads, -1)
        scores[:, tile] = torch.bmm(weights.unsqueeze(1), products).squeeze(1) * key_scales[tile]
    hidden = torch.arange(tokens, device=scores.device) >= limits.unsqueeze(1)
    return scores.masked_fill_(hidden, float("-inf"))


def fp8_paged_indexer_scores(
    queries: torch.Tensor, weights: torch.Tensor, blocks: torch.Tensor, page_table: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """Score one query per request against the keys in its index blocks: decoding, every request with pages of its own.

    Args:
        queries: float8_e4m3fn [requests, heads, dim].
        weights: fp32 [requests, heads], may be negative; each holds the scale of its quantised query.
        blocks: uint8 [blocks, page_size * (dim + 4)], all keys of a page, then all scales; each block contiguous,
            blocks may lie apart.
        page_table: int32 [requests, pages] blocks of each request by page position; anything behind the last block
            that holds keys of the request.
        limits: int64 [requests] how many keys each query may see; at most pages * page_size.

    Returns:
        fp32 [requests, pages * page_size]; -inf where a query may not look.
    """
    dim = queries.shape[2]
    page_size = blocks.shape[1] // (dim + FP8_SCALE_BYTES)
    width = page_table.shape[1] * page_size
    scores = torch.full((len(queries), width), float("-inf"), dtype=torch.float32, device=queries.device)
    for request, tokens in enumerate(limits.tolist()):
        if not tokens:
            continue
        numbers = page_table[request, : -(-tokens // page_size)].to(torch.int64)
        keys, scales = unpack_keys_and_scales(blocks, numbers, tokens=tokens, page_size=page_size, key_bytes=dim)
        own = slice(request, request + 1)
        scores[own, :tokens] = fp8_indexer_scores(
            queries[own], weights[own], keys.view(torch.float8_e4m3fn), scales, limits[own]
        )
    return scores

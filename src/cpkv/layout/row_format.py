"""What one token stores: a latent row per layer and an index key per layer that has an indexer.

latent row   float dtypes: latent (kv_lora_rank values) | rope key (qk_rope_head_dim values)
             fp8:          latent (kv_lora_rank e4m3) | one fp32 scale per 128 values | rope key (bfloat16)
                           512 + 16 + 128 = 656 bytes at rank 512 and rope 64; no padding between the parts
index page   float dtypes: key of token 0 | key of token 1 | ...
             fp8:          all keys of the page (page_size x dim e4m3) | all scales (page_size x fp32)
"""

from __future__ import annotations

from dataclasses import dataclass

from cpkv.config.names import IndexDtype, LatentDtype

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "fp8": 1}
FP8_SCALE_BYTES = 4
LATENT_SCALE_GROUP = 128


@dataclass(frozen=True)
class RowFormat:
    """The stored form of one token, in bytes.

    Attributes:
        latent_dtype: dtype of a latent row; fp8 is the packed row: e4m3 latents, fp32 scales, a bfloat16 rope key.
        kv_lora_rank: latent values of a row; attention's values are these.
        rope_dim: rope values of a row.
        index_dtype: dtype of an index key; fp8 is e4m3 with one fp32 scale per key, a power of two.
        index_dim: values of an index key.
    """

    latent_dtype: LatentDtype
    kv_lora_rank: int
    rope_dim: int
    index_dtype: IndexDtype
    index_dim: int

    @property
    def latent_width(self) -> int:
        """Values of a latent row."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def latent_scales(self) -> int:
        """Scales of a packed latent row, one per 128 values begun; a float row has none."""
        return -(-self.kv_lora_rank // LATENT_SCALE_GROUP) if self.latent_dtype == "fp8" else 0

    @property
    def latent_row_bytes(self) -> int:
        """Bytes of a latent row of one layer, its scales included."""
        if self.latent_dtype != "fp8":
            return self.latent_width * ITEM_BYTES[self.latent_dtype]
        return self.kv_lora_rank + self.latent_scales * FP8_SCALE_BYTES + self.rope_dim * ITEM_BYTES["bfloat16"]

    @property
    def index_key_bytes(self) -> int:
        """Bytes of the key alone, without its scale."""
        return self.index_dim * ITEM_BYTES[self.index_dtype]

    @property
    def index_row_bytes(self) -> int:
        """Bytes of a token's index key, its scale included."""
        return self.index_key_bytes + (FP8_SCALE_BYTES if self.index_dtype == "fp8" else 0)

"""A pool description for tests that carry one and look at nothing in it."""

from __future__ import annotations

from cpkv.protocol.messages import PROTOCOL_VERSION, PoolDescription

SAMPLE_POOL = PoolDescription(
    protocol_version=PROTOCOL_VERSION,
    model="glm5",
    num_layers=3,
    index_slots=(0, 1),
    page_size=64,
    latent_row_bytes=656,
    index_row_bytes=132,
    latent_dtype="fp8",
    index_dtype="fp8",
    norm_eps=1e-5,
    latent_norm_eps=1e-6,
    transfer="tcp",
)

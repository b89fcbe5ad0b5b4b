"""What a worker says about its pool in the handshake."""

from __future__ import annotations

from cpkv.config.settings import EngineSettings
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.model.shape import ModelShape
from cpkv.protocol.messages import PROTOCOL_VERSION, PoolDescription


def describe_pool(model: str, shape: ModelShape, geometry: PoolGeometry, settings: EngineSettings) -> PoolDescription:
    """Every field that both ends must agree on; `model` is the fingerprint from `prepare_weights`."""
    return describe_geometry(
        model, geometry, settings.transfer, norm_eps=shape.norm_eps, latent_norm_eps=shape.latent_norm_eps
    )


def describe_geometry(
    model: str, geometry: PoolGeometry, transfer: str, *, norm_eps: float, latent_norm_eps: float
) -> PoolDescription:
    """The same where there is no model, only pages."""
    row_format = geometry.row_format
    return PoolDescription(
        protocol_version=PROTOCOL_VERSION,
        model=model,
        num_layers=geometry.num_layers,
        index_slots=geometry.slots,
        page_size=geometry.page_size,
        latent_row_bytes=row_format.latent_row_bytes,
        index_row_bytes=row_format.index_row_bytes,
        latent_dtype=row_format.latent_dtype,
        index_dtype=row_format.index_dtype,
        norm_eps=norm_eps,
        latent_norm_eps=latent_norm_eps,
        transfer=transfer,
    )

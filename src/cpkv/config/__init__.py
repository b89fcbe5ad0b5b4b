"""Settings: one frozen value, resolved once, the same for every worker."""

from cpkv.config.settings import EngineSettings

__all__ = ["EngineSettings"]

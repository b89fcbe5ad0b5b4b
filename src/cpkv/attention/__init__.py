"""DSA attention over a view: exact choice of keys, then sparse MLA over the chosen rows."""

from cpkv.attention.dsa_attention import AttentionInputs, Choice, DsaAttention, IndexInputs

__all__ = ["AttentionInputs", "Choice", "DsaAttention", "IndexInputs"]

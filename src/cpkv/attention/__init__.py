"""DSA attention over a view: exact choice of keys, then sparse MLA over the chosen rows."""

from cpkv.attention.choice import AttentionInputs, Choice, IndexInputs, SparseAttention
from cpkv.attention.dsa_attention import DsaAttention
from cpkv.attention.kernel_attention import KernelAttention

__all__ = ["AttentionInputs", "Choice", "DsaAttention", "IndexInputs", "KernelAttention", "SparseAttention"]

"""Triton kernels, by the names and signatures of `cpkv.ops.reference`. Importing a module of them imports Triton."""

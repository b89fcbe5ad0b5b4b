"""The field's own kernels, unmodified, by the names and signatures of `cpkv.ops.triton`; loaded when first called."""

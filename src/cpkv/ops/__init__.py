"""Operations on tensors. `cpkv.ops.reference` holds the plain torch form of each, under the name of its kernel."""

"""The model: transformers' configuration, modules and weights, with cpkv's attention in place of theirs."""

"""What attention reads: latent rows, index keys in position order, and the row of each position."""

from cpkv.views.view import CurrentRows, LayerRows, View, ViewCounters

__all__ = ["CurrentRows", "LayerRows", "View", "ViewCounters"]

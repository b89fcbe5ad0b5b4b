"""What attention reads: latent rows, index keys in position order, and the row of each position."""

"""Plain torch: what every kernel must equal."""

"""Shared helpers for tests: fixtures, references, registration. Shipped, so that adapters can use them too."""

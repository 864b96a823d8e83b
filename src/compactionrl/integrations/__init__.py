"""Thin adapters for other people's systems, each an extra of its own."""

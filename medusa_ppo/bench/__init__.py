"""Benchmarks that users can run: what our claims are measured with."""

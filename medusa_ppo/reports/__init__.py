"""Metrics in; pages, pictures and trackers out."""

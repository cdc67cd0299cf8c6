"""Hooks for verl."""

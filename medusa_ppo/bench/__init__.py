"""How claims are measured."""

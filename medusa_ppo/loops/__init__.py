"""Hooks for other loops (TRL, verl, OpenRLHF), and what they share."""

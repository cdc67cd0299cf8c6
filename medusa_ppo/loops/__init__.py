"""Hooks for other loops (TRL, verl, OpenRLHF, SkyRL, NeMo-RL), and the code that they share."""

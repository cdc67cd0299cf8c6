"""Hooks for other people's loops: TRL, verl, OpenRLHF. Each framework is imported in one file only."""

"""Heads without PPO: train and measure them on anyone's model and data."""

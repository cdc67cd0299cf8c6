"""Heads without PPO: train and measure them, convert them, share them."""

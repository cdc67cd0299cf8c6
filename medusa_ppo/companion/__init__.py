"""The training of heads beside PPO."""

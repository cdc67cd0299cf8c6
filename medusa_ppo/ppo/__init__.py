"""The reference PPO system."""

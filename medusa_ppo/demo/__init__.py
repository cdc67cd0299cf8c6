"""The embedded example: its task, its actor, and where that is kept."""

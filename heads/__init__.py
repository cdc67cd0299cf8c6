"""The mathematics of draft heads: what they compute, how they are trained, judged and stored."""

from heads.heads_config import HeadsConfig

__all__ = ["HeadsConfig"]

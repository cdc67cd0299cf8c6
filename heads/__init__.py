"""The mathematics of draft heads: what they are, how they learn, are judged and stored."""

from heads.heads_config import HeadsConfig

__all__ = ["HeadsConfig"]

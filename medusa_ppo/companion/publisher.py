"""Files of the published heads: one in shared memory for the engine to swap in, one native checkpoint in the run's folder."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch

from heads.checkpoint import checksum, load_state, save_heads, save_state
from heads.modules import MedusaHeads

logger = logging.getLogger(__name__)

KEEP = 3


class Publisher:
    """Writes versions and keeps the last few of each kind, so that an engine that still reads an older file finds it."""

    def __init__(self, publish_dir: Path, checkpoint_dir: Path | None, keep: int = KEEP) -> None:
        """
        Args:
            publish_dir: folder in shared memory; its owner removes it.
            checkpoint_dir: folder of the native checkpoints; None: none are written.
            keep: versions kept of each kind.
        """
        self._publish_dir = publish_dir
        self._checkpoint_dir = checkpoint_dir
        self._keep = keep
        publish_dir.mkdir(parents=True, exist_ok=True)
        if checkpoint_dir is not None:
            checkpoint_dir.mkdir(parents=True, exist_ok=True)

    def publish(self, heads: MedusaHeads, version: int, lm_head_VD: torch.Tensor, metadata: dict[str, object]) -> tuple[Path, str]:
        """Write both files, atomically, then remove the oldest versions.

        Returns:
            Path of the file in shared memory, and the checksum of its tensors.
        """
        state = heads.trainable_state()
        path = self._publish_dir / f"heads-{version:06d}.safetensors"
        save_state(path, state)
        if self._checkpoint_dir is not None:
            native = self._checkpoint_dir / f"v{version:06d}"
            save_heads(
                native, heads, lm_head_VD=lm_head_VD if heads.config.lm_head == "shared" else None, metadata=metadata, version=version
            )
            self._forget(self._checkpoint_dir, "v[0-9]*")
        self._forget(self._publish_dir, "heads-*.safetensors")
        return path, checksum(state)

    def newest(self) -> tuple[int, dict[str, torch.Tensor]] | None:
        """Version and tensors of the newest file in shared memory; None when there is none."""
        files = sorted(self._publish_dir.glob("heads-*.safetensors"))
        return (int(files[-1].stem.split("-")[1]), load_state(files[-1])) if files else None

    def _forget(self, folder: Path, pattern: str) -> None:
        # By age: an earlier run in this folder may have left higher numbers.
        for old in sorted(folder.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))[: -self._keep]:
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)

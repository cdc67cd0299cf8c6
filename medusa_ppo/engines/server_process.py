"""What a started server runs: vLLM's own server module, tied to the life of the process that started it."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

# The `vllm` command of the CPU wheel does not start; the module does.
MODULE = "vllm.entrypoints.openai.api_server"
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent dies, so that a killed run leaves no server behind. Elsewhere: nothing.

    Linux means the parent's thread: the engine has to be made in a thread that lives as long as it is used.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        # The parent died before the request was made.
        sys.exit(1)


if __name__ == "__main__":
    end_with_parent()
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)

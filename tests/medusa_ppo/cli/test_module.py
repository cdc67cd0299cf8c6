"""`python -m medusa_ppo` is the command line."""

from __future__ import annotations

import subprocess
import sys

from medusa_ppo import __version__


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "medusa_ppo", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith(__version__)


# What happens if Ctrl-C comes while the program's own modules are loaded.
INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from medusa_ppo.__main__ import main
main()
"""


def test_an_interrupt_in_the_first_moment_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped.\n")

"""The program `medusa-ppo`, also as `python -m medusa_ppo` where its script is not on the path."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `medusa-ppo` script."""
    # The commands end by themselves when they are interrupted. Before there is one, while this
    # program's own modules are loaded, Ctrl-C would end in a traceback.
    try:
        from medusa_ppo.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        # As the commands (`runtime.console.INTERRUPTED`), whose module may not be loaded yet.
        sys.exit(130)


if __name__ == "__main__":
    main()

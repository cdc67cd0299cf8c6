"""The pictures of the README and the site: the flow of one PPO step, tokens per engine step over
the steps of a run, and where the seconds of a step go.

    python benchmarks/document_pictures.py keep RUN   # writes benchmarks/pictured_run.json
    python benchmarks/document_pictures.py draw       # writes docs/step.svg, acceptance.svg, ...
    python benchmarks/document_pictures.py check      # says whether they are as they would be drawn

`keep` takes from a run what the pictures need, so that everyone can draw them anew. Trained and
frozen heads are judged by replay on the same responses, those that the run held out at each step;
steps that held out none are left out, and each point is the mean of two such steps. Seconds are
those of the pair in the middle, of steps that were taken with the plugin and without it in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from heads.errors import RunError
from medusa_ppo.contract import metrics as m
from medusa_ppo.reports.picture_files import draw_stacks, draw_steps, frame, text
from medusa_ppo.reports.run_files import read_run
from medusa_ppo.reports.summary import STEP_S, middle_pair
from medusa_ppo.runtime.files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "pictured_run.json"
TOGETHER = 2
PHASES = {
    "generation": "generate_s",
    "scoring": "score_s",
    "update": "update_s",
    "weight sync": "sync_s",
}
OTHER = "other"
ROWS = {"vLLM": 44, "PPO loop": 134, "companion": 224}
"""Row of the drawing -> its upper edge."""
TALL = 60
# (row, left, width, colour, lines): what happens in a step, from left to right.
BOXES = (
    ("vLLM", 92, 196, 0, ("1  Generate", "heads draft, the actor verifies", "all drafts at once")),
    ("PPO loop", 304, 118, 2, ("2  Score", "hidden states of this", "pass are tapped")),
    ("PPO loop", 438, 118, 3, ("3  Update", "actor and critic", "learn as before")),
    ("PPO loop", 572, 84, 3, ("4  Sync", "new weights", "into vLLM")),
    ("companion", 438, 118, 4, ("Train the heads", "on this batch, the", "backbone frozen")),
    ("companion", 572, 84, 4, ("Gate", "better on held-", "out prompts?")),
    ("vLLM", 672, 76, 0, ("1  Generate", "the next", "step")),
)
# Each way of an arrow, and (left, line, words) of what travels along it.
ARROWS = (
    ("M288 74H363V134", (294, 68, "responses")),
    ("M422 164H438", None),
    ("M556 164H572", None),
    ("M363 194V254H438", (369, 216, "states")),
    ("M556 254H572", None),
    ("M614 134V74H672", (612, 68, "weights")),
    ("M656 254H710V104", (716, 180, "heads")),
)


def kept(folder: Path) -> dict[str, Any]:
    """What the pictures need of a run.

    Raises:
        RunError: the run held out nothing, or timed no pairs of whole steps.
    """
    run = read_run(folder)
    acceptance: list[list[float]] = []
    # A step without a judgement of its own shows the last one, at first that of the warm-up.
    before = round(run.steps[0].get(m.WARM_UP_BEFORE) or 0.0, 4) if run.steps else 0.0
    last = [before, before]
    for step in run.steps:
        if step.get(m.REPLAY_SERVING) and step.get(m.REPLAY_FROZEN):
            both = [round(step[m.REPLAY_SERVING], 4), round(step[m.REPLAY_FROZEN], 4)]
            if both != last:
                acceptance.append([step[m.STEP], *both])
            last = both
    pairs = run.section("comparison").get("steps") or []
    if not acceptance or not pairs:
        raise RunError(
            "The run has nothing to draw.",
            given=folder,
            expected="replay estimates, and pairs of steps with the plugin and without",
            do="Take a run of report.compare_pairs=5, such as that of medusa-ppo demo.",
        )
    seconds = [
        {side: {key: round(value, 3) for key, value in pair[side].items()} for side in pair}
        for pair in pairs
    ]
    return {
        "command": run.meta.get("command"),
        "commit": run.meta.get("commit"),
        "cpu": run.section("hardware").get("cpu"),
        "acceptance": acceptance,
        "pairs": seconds,
    }


def acceptance_picture(acceptance: Sequence[Sequence[float]]) -> str:
    groups = [acceptance[start : start + TOGETHER] for start in range(0, len(acceptance), TOGETHER)]
    means = [tuple(fmean(column) for column in zip(*group, strict=True)) for group in groups]
    steps, trained, frozen = (list(column) for column in zip(*means, strict=True))
    return draw_steps(
        "Tokens per engine step, on responses held out at each PPO step",
        [round(step) for step in steps],
        {"trained": trained, "frozen": frozen, "no drafts": [1.0] * len(steps)},
        "PPO step",
    )


def seconds_picture(pairs: Sequence[dict[str, dict[str, float]]]) -> str:
    middle = middle_pair([(pair["with"], pair["without"]) for pair in pairs])
    assert middle is not None, "a run is kept with its pairs"
    bars = {}
    for name, step in (("without the plugin", middle[1]), ("with the plugin", middle[0])):
        parts = {phase: step[key] for phase, key in PHASES.items()}
        parts[OTHER] = max(0.0, step[STEP_S] - sum(parts.values()))
        bars[name] = parts
    title = f"Where the seconds of a PPO step go: the embedded example, middle one of {len(pairs)}"
    return draw_stacks(f"{title} pairs", bars, "s")


def step_picture() -> str:
    shapes = []
    for name, y in ROWS.items():
        shapes.append(text(10, y + TALL / 2 + 4, name, 'font-weight="bold" class="quiet"'))
    for way, label in ARROWS:
        shapes.append(f'<path d="{way}" class="arrow" marker-end="url(#head)"/>')
        if label:
            shapes.append(text(*label, 'class="quiet"'))
    for row, x, width, colour, lines in BOXES:
        y = ROWS[row]
        shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{TALL}" rx="6"'
            f' class="box line{colour}"/>'
        )
        for number, words in enumerate(lines):
            weight = 'font-weight="bold" ' if number == 0 else ""
            shapes.append(
                text(x + width / 2, y + 18 + 17 * number, words, f'{weight}text-anchor="middle"')
            )
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path d="M0 0L8 4L0 8z" class="head"/></marker>'
    )
    title = "One PPO step: the companion trains the heads while the actor is updated"
    shapes += [text(10, 20, title, 'font-weight="bold"')]
    return frame(title, 760, 300, [f"<defs>{head}</defs>", *shapes])


def pictures() -> dict[Path, str]:
    """File -> what it should hold, from the kept run."""
    run = json.loads(KEPT.read_text(encoding="utf-8"))
    return {
        ROOT / "docs" / "step.svg": step_picture(),
        ROOT / "docs" / "acceptance.svg": acceptance_picture(run["acceptance"]),
        ROOT / "docs" / "seconds.svg": seconds_picture(run["pairs"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("keep", "draw", "check"))
    parser.add_argument("run", type=Path, nargs="?", help="folder of the run, for `keep`")
    options = parser.parse_args()
    if options.what == "keep":
        if options.run is None:
            parser.error("keep takes the folder of a run")
        write_atomic(KEPT, json.dumps(kept(options.run), indent=1) + "\n")
        return
    found = pictures()
    if options.what == "check":
        stale = [file.name for file, svg in found.items() if file.read_text() != svg]
        sys.stdout.write(f"stale: {', '.join(stale) or 'nothing'}\n")
        sys.exit(bool(stale))
    for file, svg in found.items():
        write_atomic(file, svg)


if __name__ == "__main__":
    main()

"""A prediction as text: the answer first, then the figures behind it."""

from __future__ import annotations

from medusa_ppo.predict.prediction import Prediction


def answer_lines(prediction: Prediction) -> list[str]:
    """The lines that `medusa-ppo predict` prints."""
    asked = prediction.question
    best = max(range(len(asked.acceptance)), default=0) + 1
    header = ["running", "best K", "pays from", *(f"K = {k}" for k in range(best + 1))]
    table = [
        [
            f"{row.sequences}",
            f"{row.best}",
            f"{row.pays_from:.2f}",
            *(f"{value:.2f}" for value in (row.without_drafts, *row.speedups)),
        ]
        for row in prediction.rows
    ]
    widths = [max(len(line[i]) for line in [header, *table]) for i in range(len(header))]
    out = [
        prediction.sentence,
        "",
        (
            f"Rollout   {_duration(prediction.plain_s)} without drafts,"
            f" {_duration(prediction.drafted_s)} with, {prediction.mean_drafts:.1f} drafts a step"
            f" on average; responses {asked.lengths.said}, {prediction.slots} at once"
            + (
                f" ({prediction.drafted_slots} with drafting, which takes memory)"
                if prediction.drafted_slots != prediction.slots
                else ""
            )
        ),
        (
            f"Long tail {100 * prediction.tail_share:.0f} % of the rollout runs with fewer than"
            f" half of these; there it is {prediction.tail_speedup:.2f} times as fast"
        ),
        f"Accepted  {', '.join(f'{share:.3g}' for share in asked.acceptance)}:"
        f" {asked.acceptance_said}",
    ]
    if prediction.step is not None and prediction.async_step is not None:
        said = "given" if asked.loop.seconds is not None else "estimated"
        out.append(
            f"Step      {prediction.step} times as fast, with"
            f" {_duration(prediction.other_s or 0.0)} outside rollouts ({said});"
            f" {prediction.async_step} if both run at once"
        )
    out += [
        f"Seconds   {prediction.source}",
        "",
        "Tokens/s over vLLM's plain step, by running sequences and drafts. Best K 0: none is",
        "faster. K = 0: our engine without drafts, with which it compares when it chooses:",
        *(
            "  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
            for line in [header, *table]
        ),
    ]
    return out


def _duration(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"

"""The figures that docs/theory.md works out by hand, from the code itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from heads.acceptance import extra_tokens, replay_probabilities
from heads.factored import FactoredLogits
from heads.losses import LossConfig, Teacher, head_loss, reference_head_loss

HEADS = 9


def replay_and_average(distances: list[int], times: int) -> tuple[float, float]:
    """Mean acceptance length by replay, and 1 + the average run over all rows; distances between
    wrongly drafted tokens repeat.
    """
    wrong = torch.zeros(1 + sum(distances) * times, dtype=torch.bool)
    wrong[torch.tensor([0, *distances * times]).cumsum(0)] = True
    right_M = (~wrong).double()
    accept_MK = torch.stack(
        [torch.cat([right_M[k:], torch.zeros(k).double()]) for k in range(1, HEADS + 1)], dim=1
    )
    result = replay_probabilities(accept_MK, torch.tensor([len(right_M)]))
    runs_M = accept_MK.cumprod(1).sum(1)[: len(right_M) - 1]
    return result.mean_acceptance_length, 1 + float(runs_M.mean())


@pytest.mark.parametrize(
    ("distances", "true", "average"),
    [([1, 1, 1, 9], 3.0, 4.0), ([3], 3.0, 2.0), ([1, 5], 3.0, (13 / 3 + 1) / 2)],
    ids=["clustered", "even", "two kinds"],
)
def test_averages_over_all_positions_are_wrong_by_the_formula(
    distances: list[int], true: float, average: float
) -> None:
    """Proposition 7: (mean + variance / mean + 1) / 2 instead of the mean."""
    gaps = torch.tensor(distances, dtype=torch.float64)
    assert ((gaps.mean() ** 2 + gaps.var(correction=0)) / gaps.mean() + 1) / 2 == pytest.approx(
        average
    )
    assert replay_and_average(distances, 50) == pytest.approx((true, average))


def test_geometric_distances_make_no_difference() -> None:
    """Right and wrong from token to token independently: the average over positions agrees."""
    generator = torch.Generator().manual_seed(0)
    accept_MK = (torch.rand(50_000, generator=generator) < 0.6).double().unsqueeze(1)
    result = replay_probabilities(accept_MK, torch.full((500,), 100))
    assert result.mean_acceptance_length == pytest.approx(1.6, abs=0.01)


@pytest.mark.parametrize("name", ["ce", "tv", "kl", "exact_tv"])
def test_gradients_are_those_of_the_table(name: str) -> None:
    """Section 6: the gradient by the logits at temperature 1, written out."""
    generator = torch.Generator().manual_seed(1)
    logits_V = torch.randn(6, generator=generator)
    teacher_V = torch.randn(6, generator=generator)
    q = logits_V.softmax(0)
    p = teacher_V.softmax(0)
    target = int((p - q).argmax())  # q(y) < p(y), so that `tv` has a gradient.
    below = (q < p).float()
    written = {
        "ce": q - torch.eye(6)[target],
        "tv": q[target] / p[target] * (q - torch.eye(6)[target]),
        "kl": q - p,
        "exact_tv": (below * q).sum() * q - below * q,
    }
    # The identity as lm_head: features are logits.
    features_NKD = logits_V.view(1, 1, 6).clone().requires_grad_()
    config = LossConfig(**{**{"ce": 0.0}, name: 1.0})
    loss_K = head_loss(
        FactoredLogits(features_NKD, torch.eye(6)),
        torch.tensor([[target]]),
        torch.tensor([[True]]),
        config,
        logprobs_NK=p[target].log().view(1, 1),
        teacher=Teacher(teacher_V.view(1, 6), torch.tensor([[0]]), torch.eye(6)),
    )
    loss_K.sum().backward()
    assert features_NKD.grad is not None
    torch.testing.assert_close(features_NKD.grad.flatten(), written[name])
    plain_K = reference_head_loss(
        logits_V.view(1, 1, 6),
        torch.tensor([[target]]),
        torch.tensor([[True]]),
        config,
        logprobs_NK=p[target].log().view(1, 1),
        teacher_logits_NKV=teacher_V.view(1, 1, 6),
    )
    torch.testing.assert_close(loss_K.detach(), plain_K)


def test_one_hot_and_sampled_drafts_of_section_four() -> None:
    def both(p: list[float], q: list[float]) -> tuple[float, float]:
        one_hot = p[max(range(2), key=q.__getitem__)]
        return sum(map(min, p, q)), one_hot

    assert both([0.6, 0.4], [0.7, 0.3]) == pytest.approx((0.9, 0.6))
    assert both([0.9, 0.1], [0.6, 0.4]) == pytest.approx((0.7, 0.9))


PAGE = Path(__file__).parents[2] / "docs" / "theory.md"
STATEMENT = re.compile(r"^\*\*((?:Theorem|Lemma|Corollary|Proposition) \d+\w?)", re.MULTILINE)
CODE = re.compile(r"`((?:heads|medusa_ppo|tests)/[\w/]+\.py)(?:: (\w+))?`")


def statements() -> list[tuple[str, str]]:
    """Each statement's name, and its text up to the next one."""
    text = PAGE.read_text()
    found = list(STATEMENT.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return [(m.group(1), text[m.start() : end]) for m, end in zip(found, ends, strict=True)]


@pytest.mark.parametrize(("name", "text"), statements(), ids=[name for name, _ in statements()])
def test_each_statement_names_its_function_and_a_test_names_it(name: str, text: str) -> None:
    """A proof is of a program only where the program can be found: it says which function it is
    about, that function is there, and the test that it names says which statement it looks at.
    """
    said = text.partition("*Of the program:*")[2].partition("\n\n")[0]
    named = CODE.findall(" ".join(said.split()))
    code = [(file, function) for file, function in named if not file.startswith("tests/")]
    tests = [file for file, _ in named if file.startswith("tests/")]
    assert code and tests, f"{name} names no function or no test"
    root = PAGE.parents[1]
    for file, function in code:
        source = (root / file).read_text()
        assert function, f"{name} names {file} alone, and no function of it"
        assert re.search(rf"^(?:def|class) {function}\b", source, re.MULTILINE), (
            f"{name}: {file} has no {function}"
        )
    assert any(
        name.lower() in " ".join((root / file).read_text().lower().split()) for file in tests
    ), f"no test of {tests} names {name.lower()}"


def test_the_ratio_is_biased_by_the_formula_of_theorem_6() -> None:
    """Theorem 6, a ratio of sums over few prompts: (R Var(D) - Cov(A, D)) / (S E[D]^2) too high."""
    generator = torch.Generator().manual_seed(0)
    drafts = torch.randint(1, 12, (200_000, 6), generator=generator).double()
    accepted = 0.5 * drafts.square() / 6  # More where responses are longer.
    ratio = float((accepted.sum(1) / drafts.sum(1)).mean())
    one_d, one_a = drafts.flatten(), accepted.flatten()
    true = float(one_a.mean() / one_d.mean())
    covariance = float(((one_a - one_a.mean()) * (one_d - one_d.mean())).mean())
    formula = (true * float(one_d.var()) - covariance) / (6 * float(one_d.mean()) ** 2)
    assert ratio - true == pytest.approx(formula, rel=0.2) and formula < -0.01
    value, pull = extra_tokens(accepted[0], drafts[0])
    assert value == pytest.approx(float(accepted[0].sum() / drafts[0].sum()))
    assert float(pull.sum()) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("one_token", "exact"), [("ce", "kl"), ("tv", "exact_tv")])
def test_proposition_9_the_mean_over_tokens_is_the_exact_form(one_token: str, exact: str) -> None:
    """Proposition 9, of the gradient; of total variation and Pinsker's bound also the value."""
    generator = torch.Generator().manual_seed(2)
    logits_V, teacher_V = torch.randn(2, 7, generator=generator)
    q, p = logits_V.softmax(0), teacher_V.softmax(0)

    def gradient(name: str, target: int) -> torch.Tensor:
        features = logits_V.view(1, 1, 7).clone().requires_grad_()
        loss_K = head_loss(
            FactoredLogits(features, torch.eye(7)),
            torch.tensor([[target]]),
            torch.tensor([[True]]),
            LossConfig(**{**{"ce": 0.0}, name: 1.0}),
            logprobs_NK=p[target].log().view(1, 1),
            teacher=Teacher(teacher_V.view(1, 7), torch.tensor([[0]]), torch.eye(7)),
        )
        loss_K.sum().backward()
        assert features.grad is not None
        return features.grad.flatten()

    mean = torch.stack([p[y] * gradient(one_token, y) for y in range(7)]).sum(0)
    torch.testing.assert_close(mean, gradient(exact, 0), rtol=1e-5, atol=1e-6)
    accepted = float(torch.minimum(p, q).sum())
    divergence = float((p * (p / q).log()).sum())
    assert accepted >= 1 - (divergence / 2) ** 0.5

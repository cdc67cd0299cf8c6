"""Chunked losses against their plain references, values and gradients; and what they must never
do.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from heads.errors import ConfigError
from heads.factored import FactoredLogits
from heads.heads_config import HeadsConfig
from heads.losses import LossConfig, Teacher, head_loss, known_lse, reference_head_loss
from heads.modules import MedusaHeads
from heads.vocabulary import truncate_logits

D, V, K, N = 16, 40, 3, 23
CONFIGS = {
    "ce": LossConfig(),
    "tv": LossConfig.named("tv"),
    "ce_tv": LossConfig.named("ce_tv"),
    "kl": LossConfig.named("kl"),
    "exact_tv": LossConfig(0.0, exact_tv=1.0),
    "kl_tv": LossConfig.named("kl_tv"),
    "all": LossConfig(0.3, 1.0, 0.7, 0.5),
}


class Case:
    """Random heads and rows of one kind, with behaviour log-probs on both sides of the heads'
    own.
    """

    def __init__(
        self,
        device: torch.device,
        kind: str,
        lm_head: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.heads = MedusaHeads(HeadsConfig(D, V, K, kind, 1, lm_head))
        self.lm_head_VD = torch.randn(V, D, generator=generator).to(dtype)
        self.embedding_VD = torch.randn(V, D, generator=generator).to(dtype)
        if lm_head == "own":
            self.heads.init_own_lm_heads(self.lm_head_VD)
        with torch.no_grad():
            for parameter in self.heads.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        # Drawn on the host and moved: the same numbers on every device.
        self.heads.to(device, dtype)
        self.lm_head_VD, self.embedding_VD = (
            table.to(device) for table in (self.lm_head_VD, self.embedding_VD)
        )
        self.hidden_ND = torch.randn(N, D, generator=generator).to(device, dtype)
        self.condition_NK = torch.randint(V, (N, K), generator=generator).to(device)
        self.targets_NK = torch.randint(V, (N, K), generator=generator).to(device)
        self.mask_NK = (torch.rand(N, K, generator=generator) > 0.2).to(device)
        self.logprobs_NK = -6 * torch.rand(N, K, generator=generator).to(device)
        rows_NK = torch.randint(N, (N, K), generator=generator).to(device)
        self.teacher = Teacher(self.hidden_ND, rows_NK, self.lm_head_VD, 0.7)

    def chunked(
        self,
        config: LossConfig,
        chunk_rows: int | None = 5,
        *,
        logprobs: bool = True,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        factored = self.heads.factored(
            self.hidden_ND,
            self.lm_head_VD,
            condition=self.condition_NK,
            embedding_VD=self.embedding_VD,
        )
        logprobs_NK = self.logprobs_NK if logprobs else None
        return head_loss(
            factored,
            self.targets_NK,
            self.mask_NK,
            config,
            logprobs_NK=logprobs_NK,
            teacher=self.teacher,
            temperature=temperature,
            chunk_rows=chunk_rows,
        )

    def reference(
        self, config: LossConfig, *, logprobs: bool = True, temperature: float = 1.0
    ) -> torch.Tensor:
        logits_NKV = self.heads(
            self.hidden_ND,
            self.lm_head_VD,
            condition=self.condition_NK,
            embedding_VD=self.embedding_VD,
        )
        teacher_NKV = (
            F.linear(self.hidden_ND[self.teacher.rows_NK], self.lm_head_VD).float()
            / self.teacher.temperature
        )
        logprobs_NK = self.logprobs_NK if logprobs else None
        return reference_head_loss(
            logits_NKV,
            self.targets_NK,
            self.mask_NK,
            config,
            logprobs_NK=logprobs_NK,
            teacher_logits_NKV=teacher_NKV,
            temperature=temperature,
        )

    def gradients(self, loss_K: torch.Tensor) -> list[torch.Tensor]:
        """Of a sum with unequal weights, so that a head's gradient scaled by another head's weight
        would show.
        """
        self.heads.zero_grad()
        (loss_K * torch.tensor([1.0, 2.0, 5.0], device=loss_K.device)).sum().backward()
        return [parameter.grad.float().clone() for parameter in self.heads.parameters()]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("kind", "lm_head"),
    [
        ("medusa", "shared"),
        ("medusa", "own"),
        ("hydra", "shared"),
    ],
)
def test_values_and_gradients_float32(
    device: torch.device, name: str, kind: str, lm_head: str
) -> None:
    case = Case(device, kind, lm_head)
    config = CONFIGS[name]
    chunked_K = case.chunked(config)
    reference_K = case.reference(config)
    torch.testing.assert_close(chunked_K, reference_K, rtol=1e-5, atol=1e-6)
    for ours, plain in zip(case.gradients(chunked_K), case.gradients(reference_K), strict=True):
        torch.testing.assert_close(
            ours, plain, rtol=1e-4, atol=1e-5 * max(1.0, float(plain.abs().max()))
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_float_mask_weighs_positions(device: torch.device, name: str) -> None:
    case = Case(device, "medusa", "shared")
    config = CONFIGS[name]
    weights_N1 = torch.rand(N, 1, generator=torch.Generator().manual_seed(0)).mul(4)
    case.mask_NK = case.mask_NK * weights_N1.to(device)
    chunked_K = case.chunked(config, None)
    reference_K = case.reference(config)
    torch.testing.assert_close(chunked_K, reference_K, rtol=1e-5, atol=1e-6)
    for ours, plain in zip(case.gradients(chunked_K), case.gradients(reference_K), strict=True):
        torch.testing.assert_close(
            ours, plain, rtol=1e-4, atol=1e-5 * max(1.0, float(plain.abs().max()))
        )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("kind", "lm_head"),
    [("medusa", "shared"), ("medusa", "own"), ("hydra", "shared")],
)
def test_values_and_gradients_bfloat16(
    device: torch.device, name: str, kind: str, lm_head: str
) -> None:
    """Only the products are bfloat16: the loss itself is not rounded to it, and gradients agree in
    direction and size.
    """
    case = Case(device, kind, lm_head, torch.bfloat16)
    config = CONFIGS[name]
    chunked_K = case.chunked(config)
    reference_K = case.reference(config)
    assert chunked_K.dtype == torch.float32
    # A GPU's products of other numbers of rows round some logits the other way.
    near = 1e-4 if device.type == "cpu" else 5e-3
    torch.testing.assert_close(chunked_K, reference_K, rtol=near, atol=1e-5)
    for ours, plain in zip(case.gradients(chunked_K), case.gradients(reference_K), strict=True):
        assert float((ours - plain).norm()) <= 0.02 * float(plain.norm())


def test_neighbours_share_their_teachers(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's distribution is computed once, however many heads of whatever rows read it."""
    case = Case(device, "medusa", "shared")
    config = CONFIGS["kl_tv"]
    asked = []
    case.teacher = case.teacher._replace(
        rows_NK=(torch.arange(N)[:, None] + torch.arange(K)).clamp(max=N - 1).to(device)
    )
    plain = Teacher.logprobs
    monkeypatch.setattr(
        Teacher,
        "logprobs",
        lambda self, rows_C, *more: (asked.append(rows_C.numel()), plain(self, rows_C, *more))[1],
    )
    chunked_K = case.chunked(config, N)
    reference_K = case.reference(config)
    assert asked == [N]
    torch.testing.assert_close(chunked_K, reference_K, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(case.gradients(chunked_K), case.gradients(reference_K), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["medusa"])
@pytest.mark.parametrize("name", ["kl", "exact_tv", "kl_tv"])
def test_a_part_of_the_vocabulary(device: torch.device, kind: str, name: str) -> None:
    """p is that of its tokens among all, though no other row of lm_head is multiplied by: one
    token's log-prob says the rest.
    """
    case = Case(device, kind, "shared")
    config = CONFIGS[name]
    ids_W = torch.tensor([0, 3, 4, 9, 17, 31, 38], device=device)
    logp_NV = (F.linear(case.hidden_ND, case.lm_head_VD) / 0.7).log_softmax(-1)
    ids_N = torch.arange(N, device=device) % V
    rows_NK = case.teacher.rows_NK
    lse_N = known_lse(
        case.hidden_ND, ids_N, logp_NV.gather(1, ids_N[:, None])[:, 0], case.lm_head_VD, 0.7
    )
    teacher = Teacher(case.hidden_ND, rows_NK, case.lm_head_VD[ids_W], 0.7, lse_M=lse_N)
    tables = {"condition": case.condition_NK, "embedding_VD": case.embedding_VD}
    factored = case.heads.factored(case.hidden_ND, case.lm_head_VD, **tables).of_tokens(ids_W)
    chunked_K = head_loss(
        factored, case.targets_NK % 7, case.mask_NK, config, teacher=teacher, chunk_rows=8
    )
    logp_NKW = logp_NV[rows_NK][..., ids_W]
    logq_NKW = case.heads(case.hidden_ND, case.lm_head_VD, **tables)[..., ids_W].log_softmax(-1)
    kl_NK = (logp_NKW.exp() * (logp_NKW - logq_NKW)).sum(-1)
    tv_NK = 1 - torch.minimum(logp_NKW.exp(), logq_NKW.exp()).sum(-1)
    expected_K = ((config.kl * kl_NK + config.exact_tv * tv_NK) * case.mask_NK).sum(
        0
    ) / case.mask_NK.sum(0)
    torch.testing.assert_close(chunked_K, expected_K, rtol=1e-5, atol=1e-5)
    for ours, plain in zip(case.gradients(chunked_K), case.gradients(expected_K), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_probabilities_of_some_tokens_never_sum_to_more_than_one(device: torch.device) -> None:
    """The engine's log-prob and the scorer's logits are of two passes: where they differ the sum
    that follows from both may be too small.
    """
    case = Case(device, "hydra", "shared")
    ids_W = torch.arange(V - 1, device=device)
    logp_NV = (F.linear(case.hidden_ND, case.lm_head_VD) / 0.7).log_softmax(-1)
    ids_N = torch.arange(N, device=device) % V
    right_N = logp_NV.gather(1, ids_N[:, None])[:, 0]
    for off, exceeds in ((0.0, False), (1.0, True)):
        lse_N = known_lse(case.hidden_ND, ids_N, right_N + off, case.lm_head_VD, 0.7)
        teacher = Teacher(
            case.hidden_ND, case.teacher.rows_NK, case.lm_head_VD[ids_W], 0.7, lse_M=lse_N
        )
        total_N = teacher.logprobs(torch.arange(N, device=device)).exp().sum(1)
        assert bool((total_N <= 1 + 1e-5).all())
        plain_N = (logp_NV[:, ids_W].exp().sum(1) * math.exp(off)) > 1 + 1e-4
        assert bool(plain_N.any()) == exceeds, "without the bound they would"


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_temperature_of_the_rollouts(device: torch.device, temperature: float) -> None:
    case = Case(device, "medusa", "own")
    config = LossConfig(0.3, 1.0, 0.7, 0.5)
    chunked_K = case.chunked(config, temperature=temperature)
    reference_K = case.reference(config, temperature=temperature)
    torch.testing.assert_close(chunked_K, reference_K)
    assert not torch.allclose(chunked_K, case.chunked(config))
    for ours, plain in zip(case.gradients(chunked_K), case.gradients(reference_K), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_kl_to_a_truncated_actor(device: torch.device) -> None:
    """With top-k and top-p the teacher is what was really sampled from; tokens that were cut add
    nothing.
    """
    case = Case(device, "medusa", "shared")
    config = LossConfig(0.0, kl=1.0, exact_tv=0.5)
    case.teacher = case.teacher._replace(top_k=6, top_p=0.9)
    logits_NKV = (
        F.linear(case.hidden_ND[case.teacher.rows_NK], case.lm_head_VD) / case.teacher.temperature
    )
    teacher_NKV = truncate_logits(logits_NKV.reshape(-1, V), 6, 0.9).reshape(N, K, V)
    plain = case.heads(case.hidden_ND, case.lm_head_VD)
    reference_K = reference_head_loss(
        plain, case.targets_NK, case.mask_NK, config, teacher_logits_NKV=teacher_NKV
    )
    chunked_K = case.chunked(config)
    assert bool(torch.isfinite(chunked_K).all())
    torch.testing.assert_close(chunked_K, reference_K)
    for ours, expected in zip(case.gradients(chunked_K), case.gradients(reference_K), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [1, 7, N, 1000, None])
def test_the_size_of_a_chunk_does_not_matter(device: torch.device, chunk_rows: int | None) -> None:
    case = Case(device, "medusa", "own")
    config = CONFIGS["all"]
    torch.testing.assert_close(
        case.chunked(config, chunk_rows), case.chunked(config, N), rtol=1e-5, atol=1e-6
    )
    for a, b in zip(
        case.gradients(case.chunked(config, chunk_rows)),
        case.gradients(case.chunked(config, N)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_against_torch_cross_entropy(device: torch.device) -> None:
    """The references are not their own judge: PyTorch's cross-entropy says the same, and so does
    its chunked linear one.
    """
    case = Case(device, "medusa", "shared")
    features_NKD = case.heads.features(case.hidden_ND)
    ours_K = head_loss(
        FactoredLogits(features_NKD, case.lm_head_VD),
        case.targets_NK,
        case.mask_NK,
        LossConfig(),
        chunk_rows=4,
    )
    logits_NKV = F.linear(features_NKD, case.lm_head_VD)
    torch.testing.assert_close(
        ours_K, reference_head_loss(logits_NKV, case.targets_NK, case.mask_NK, LossConfig())
    )
    for k in range(K):
        targets_N = torch.where(case.mask_NK[:, k], case.targets_NK[:, k], -100)
        torch.testing.assert_close(ours_K[k], F.cross_entropy(logits_NKV[:, k], targets_N))
        fused = F.linear_cross_entropy(
            features_NKD[:, k],
            case.lm_head_VD,
            targets_N,
            options=torch.nn.LinearCrossEntropyOptions(),
        )
        torch.testing.assert_close(ours_K[k], fused)


def test_total_variation_of_on_policy_tokens() -> None:
    """Mean of 1 - min(1, q/p) over tokens drawn from p is TV(p, q) = 1 - sum min(p, q)."""
    generator = torch.Generator().manual_seed(0)
    p_V, q_V = (torch.randn(V, generator=generator).softmax(-1) for _ in range(2))
    draws_N = torch.multinomial(p_V, 200_000, replacement=True, generator=generator)
    loss = reference_head_loss(
        q_V.log().expand(1, 1, V).expand(draws_N.numel(), 1, V),
        draws_N[:, None],
        torch.ones(draws_N.numel(), 1, dtype=torch.bool),
        LossConfig.named("tv"),
        logprobs_NK=p_V.log()[draws_N][:, None],
    )
    exact = float(1 - torch.minimum(p_V, q_V).sum())
    assert abs(float(loss) - exact) < 4 * 0.5 / math.sqrt(draws_N.numel())


def test_heads_without_a_position_lose_nothing(device: torch.device) -> None:
    case = Case(device, "medusa", "shared")
    case.mask_NK[:, 1] = False
    loss_K = case.chunked(LossConfig())
    assert loss_K[1].item() == 0.0 and bool(torch.isfinite(loss_K).all())
    case.gradients(loss_K)
    assert not bool(case.heads.blocks[0].grad[1].any()) and bool(case.heads.blocks[0].grad[0].any())


def test_masked_positions_do_not_count(device: torch.device) -> None:
    case = Case(device, "medusa", "shared")
    before = case.chunked(CONFIGS["all"]).detach()
    case.targets_NK[~case.mask_NK] = 1
    case.logprobs_NK[~case.mask_NK] = 0.0
    torch.testing.assert_close(case.chunked(CONFIGS["all"]).detach(), before)


def test_the_frozen_lm_head_never_gets_a_gradient(device: torch.device) -> None:
    case = Case(device, "medusa", "shared")
    case.lm_head_VD.requires_grad_()
    features_NKD = case.heads.features(case.hidden_ND)
    head_loss(
        FactoredLogits(features_NKD, case.lm_head_VD), case.targets_NK, case.mask_NK, LossConfig()
    ).sum().backward()
    assert case.lm_head_VD.grad is None and bool(case.heads.blocks[0].grad.any())


def test_extreme_logits_stay_finite(device: torch.device) -> None:
    case = Case(device, "medusa", "shared")
    case.lm_head_VD = case.lm_head_VD * 300
    case.logprobs_NK = torch.full_like(case.logprobs_NK, -90.0)
    loss_K = case.chunked(CONFIGS["all"])
    assert bool(torch.isfinite(loss_K).all()) and all(
        bool(torch.isfinite(g).all()) for g in case.gradients(loss_K)
    )


def test_no_gradient_no_work(device: torch.device) -> None:
    case = Case(device, "medusa", "own")
    with torch.no_grad():
        loss_K = case.chunked(CONFIGS["ce_tv"])
    assert not loss_K.requires_grad
    torch.testing.assert_close(loss_K, case.reference(CONFIGS["ce_tv"]).detach())


def test_used_up_gradients_are_an_error(device: torch.device) -> None:
    loss_K = Case(device, "medusa", "shared").chunked(LossConfig())
    loss_K.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="consumes the gradients"):
        loss_K.sum().backward()


def test_total_variation_warms_up_with_cross_entropy() -> None:
    config = LossConfig.named("tv")
    assert (
        config.at(0) == config.at(config.warm_up_steps - 1) == LossConfig()
        and config.at(config.warm_up_steps) is config
    )
    assert LossConfig.named("ce_tv").at(0).tv == 1.0 and LossConfig.named("kl").at(0).kl == 1.0


def test_missing_inputs_are_named(device: torch.device) -> None:
    case = Case(device, "medusa", "shared")
    with pytest.raises(ConfigError, match="log-probs"):
        case.chunked(LossConfig.named("tv"), logprobs=False)
    case.teacher = None
    with pytest.raises(ConfigError, match="distribution"):
        case.chunked(LossConfig.named("kl"))
    with pytest.raises(ConfigError, match="Unknown loss"):
        LossConfig.named("mse")
    with pytest.raises(ConfigError, match="weight"):
        LossConfig(0.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match="targets"):
        head_loss(
            FactoredLogits(torch.zeros(4, K, D, device=device), case.lm_head_VD),
            torch.zeros(5, K, dtype=torch.int64, device=device),
            torch.ones(4, K, dtype=torch.bool, device=device),
            LossConfig(),
        )


PEAK = """
import resource, sys, torch
from heads.losses import LossConfig, head_loss
from heads.factored import FactoredLogits
rows = int(sys.argv[1])
torch.set_num_threads(1)
features = torch.zeros(rows, 2, 16, requires_grad=True)
weight = torch.zeros(8192, 16)
ids, mask = torch.zeros(rows, 2, dtype=torch.int64), torch.ones(rows, 2, dtype=torch.bool)
first = FactoredLogits(features[:64], weight)
head_loss(first, ids[:64], mask[:64], LossConfig(), chunk_rows=64).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
head_loss(FactoredLogits(features, weight), ids, mask, LossConfig(), chunk_rows=64).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_rows_times_vocabulary() -> None:
    """8,192 rows x 2 heads x 8,192 tokens are 512 MiB of float32 logits; the loss may add a few MiB
    for features and gradients.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "8192"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(done.stdout) < 32 * 1024

"""Training from nothing: it learns, it repeats itself, it goes on where it was, and it leaves the
process as it found it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from medusa_ppo.demo import pretraining as pretrain
from medusa_ppo.demo.pretraining import Muon, PretrainStatus, Recipe, orthogonal, train_actor
from medusa_ppo.demo.task import build_tokenizer

MICRO = Recipe(
    steps=24,
    batch_size=4,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    learning_rate=1e-2,
    warmup_steps=4,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


class _Stop(Exception):
    pass


@pytest.mark.parametrize("bfloat16", [False, True])
def test_the_loss_falls_and_progress_is_told(
    tokenizer: PreTrainedTokenizerBase, device: torch.device, bfloat16: bool
) -> None:
    seen: list[PretrainStatus] = []
    actor = train_actor(MICRO, tokenizer, progress=seen.append, bfloat16=bfloat16, device=device)
    kinds = {(parameter.dtype, parameter.device.type) for parameter in actor.parameters()}
    assert kinds == {(torch.float32, "cpu")}
    assert [status.done for status in seen] == list(range(1, MICRO.steps + 1))
    assert {status.total for status in seen} == {MICRO.steps}
    assert seen[-1].loss < 0.8 * seen[0].loss


def test_the_same_recipe_gives_the_same_actor_and_spares_global_state(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    threads = torch.get_num_threads()
    state = torch.random.get_rng_state()
    first = train_actor(MICRO, tokenizer, threads=threads + 1)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    second = train_actor(MICRO, tokenizer, threads=threads + 1)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_an_interrupted_training_ends_with_the_same_actor(
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pretrain, "SAVE_EVERY_S", 0.0)
    partial = tmp_path / "actor.partial"

    def stop_after_ten(status: PretrainStatus) -> None:
        if status.done == 10:
            raise _Stop

    with pytest.raises(_Stop):
        train_actor(MICRO, tokenizer, progress=stop_after_ten, partial=partial, device=device)
    assert partial.is_file()
    seen: list[PretrainStatus] = []
    resumed = train_actor(MICRO, tokenizer, progress=seen.append, partial=partial, device=device)
    assert seen[0].done == 11
    straight = train_actor(MICRO, tokenizer, device=device)
    # On a GPU the backward pass of attention sums in another order each time.
    apart = 0.0 if device.type == "cpu" else 1e-3
    for ours, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=apart)


@pytest.mark.parametrize(
    "content", [b"", b"not safetensors at all", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "]
)
def test_an_unreadable_unfinished_training_is_started_again(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, content: bytes
) -> None:
    partial = tmp_path / "actor.partial"
    partial.write_bytes(content)
    seen: list[PretrainStatus] = []
    train_actor(
        Recipe(**{**vars(MICRO), "steps": 2}), tokenizer, progress=seen.append, partial=partial
    )
    assert [status.done for status in seen] == [1, 2]


def test_muon_takes_the_steps_of_torchs() -> None:
    torch.manual_seed(0)
    start = torch.randn(3, 16, 16)
    ours = [torch.nn.Parameter(matrix.clone()) for matrix in start]
    theirs = [torch.nn.Parameter(matrix.clone()) for matrix in start]
    optimizers = (
        Muon(ours, lr=0.1, dtype=torch.float32),
        torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0),
    )
    for _ in range(4):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(16, 16)
            other.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for own, other, before in zip(ours, theirs, start, strict=True):
        taken = (other - before).norm()
        assert taken > 0.5
        # Theirs multiplies in bfloat16.
        assert (own - other).norm() < 0.03 * taken


def test_a_step_has_the_directions_of_the_gradient_and_one_size() -> None:
    torch.manual_seed(0)
    matrices_NDD = torch.randn(2, 32, 32, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrices_NDD)
    values = (left.mT @ orthogonal(matrices_NDD) @ right.mT).diagonal(dim1=1, dim2=2)
    off = (left.mT @ orthogonal(matrices_NDD) @ right.mT) - torch.diag_embed(values)
    assert off.abs().max() < 1e-8
    # The smallest singular values of a random matrix are not brought up in five steps.
    assert (values < 1.25).all() and values.median() > 0.65

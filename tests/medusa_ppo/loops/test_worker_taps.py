"""Taps in the policy workers of SkyRL and NeMo-RL: their rows reach a real companion. Their workers
are stood in for here by classes with the same calls. tests/contracts/test_skyrl.py runs SkyRL's
own; NeMo-RL's was never run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.runtime_env.runtime_env import RuntimeEnv, _merge_runtime_env

from heads.errors import ConfigError
from heads.vocabulary import truncate_logits
from medusa_ppo.actors.hf import load_actor
from medusa_ppo.companion.companion_link import COMPANION_TOKEN, HttpLink
from medusa_ppo.companion.parts_wire import PartHeader, Wish
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.feeds.http_feed import FEED_TOKEN
from medusa_ppo.loops import nemo_rl, skyrl
from medusa_ppo.loops.worker_tap import (
    COMPANION,
    JOB,
    companion_address,
    own_secrets,
    own_variables,
    response_rows,
)
from medusa_ppo.runtime.control_guard import TOKEN
from tests.medusa_ppo.loops.served_desk import served_desk

PROMPT, RESPONSE = [5, 6], [1, 2, 3]


@pytest.fixture
def seen(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[RolloutBatch]]:
    """Batches that reach a companion's training, which is where the environment says."""
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    with served_desk(chain_actor, tmp_path) as served:
        monkeypatch.setenv(COMPANION, served.address)
        yield served.seen


def test_rows_of_padded_batches() -> None:
    ids_BT = torch.tensor([[0, 5, 6, 1, 2], [7, 3, 9, 4, 8], [0, 0, 1, 2, 3], [5, 6, 1, 2, 0]])
    real_BT = ids_BT != 0
    written_BT = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1, 0]])
    # The second one has a tool's token in between, the third one no prompt.
    assert response_rows(ids_BT, real_BT, written_BT) == ([[5, 6], [5, 6]], [[1, 2], [1, 2]], None)
    assert response_rows(ids_BT, real_BT, torch.zeros_like(ids_BT)) == ([], [], None)
    *_, logprobs = response_rows(ids_BT, real_BT, written_BT, -torch.arange(20.0).view(4, 5))
    assert logprobs is not None
    assert [row.tolist() for row in logprobs] == [[-3.0, -4.0], [-17.0, -18.0]]


def test_who_has_no_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPANION, raising=False)
    with pytest.raises(ConfigError, match=COMPANION):
        companion_address()


def test_no_secret_is_among_the_variables_that_ray_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MEDUSA_PPO_")]:
        monkeypatch.delenv(name)
    variables = {COMPANION: "ray:companion", "MEDUSA_PPO_FEED": "ray:feed"}
    secrets = dict.fromkeys((TOKEN, COMPANION_TOKEN, FEED_TOKEN), "a secret")
    for name, value in (variables | secrets).items():
        monkeypatch.setenv(name, value)
    assert (own_variables(), own_secrets()) == (variables, secrets)


def test_ray_takes_what_is_handed_on_in_a_job_that_gives_our_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ray job submit --runtime-env-json` sets them in the driver too, and Ray refuses a name that
    both give.
    """
    monkeypatch.setenv("MEDUSA_PPO_FEED", "ray:feed")
    for env_vars in ({COMPANION: "ray:companion"}, {}, None):
        job = {} if env_vars is None else {"env_vars": env_vars}
        monkeypatch.setenv(JOB, json.dumps({"runtime_env": job}))
        monkeypatch.setenv(COMPANION, "ray:companion")
        merged = _merge_runtime_env(RuntimeEnv(**job), RuntimeEnv(env_vars=own_variables()))
        assert merged is not None, "Ray refuses it"
        found = merged["env_vars"]
        assert (found[COMPANION], found["MEDUSA_PPO_FEED"]) == ("ray:companion", "ray:feed")


class SkyRLWorker:
    """In the place of SkyRL's: its two calls, over a batch that is padded on the left."""

    def __init__(self, actor: Any) -> None:
        self.model = SimpleNamespace(model=actor)
        self.cfg = SimpleNamespace(algorithm=SimpleNamespace(temperature=1.0))

    def forward_backward(self, data: dict[str, torch.Tensor], loss_fn: str | None = None) -> str:
        positions = (data["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        output = self.model.model(
            data["sequences"], attention_mask=data["attention_mask"], position_ids=positions
        )
        output.logits.square().mean().backward()
        return "metrics"

    def optim_step(self) -> float:
        with torch.no_grad():
            self.model.model.lm_head.weight.add_(0.1)
        return 1.0


def sampled_logprobs(batch: RolloutBatch, lm_head_VD: torch.Tensor) -> torch.Tensor:
    """Of the batch's tokens, from its own states, with its cut."""
    logits_MV = batch.hidden_MD.float() @ lm_head_VD.T
    own_M1 = batch.response_ids_M[:, None]
    chosen_M1 = logits_MV.gather(1, own_M1)
    cut_MV = truncate_logits(logits_MV / batch.temperature, batch.top_k, batch.top_p)
    return cut_MV.scatter(1, own_M1, chosen_M1).log_softmax(-1).gather(1, own_M1)[:, 0]


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, -1), (0.9, 5)])
def test_skyrls_update_is_tapped(
    seen: list[RolloutBatch],
    chain_actor: Path,
    monkeypatch: pytest.MonkeyPatch,
    top_p: float,
    top_k: int,
) -> None:
    """With the log-probs of its own pass, unless it samples from some tokens only: its pass knows
    nothing of that.
    """
    # Only the driver has the token; its class brings it.
    secrets = own_secrets()
    monkeypatch.delenv(COMPANION_TOKEN)
    worker = skyrl.tapped(SkyRLWorker, secrets, top_p=top_p, top_k=top_k)(load_actor(chain_actor))
    lm_head_VD = worker.model.model.lm_head.weight.detach().float().clone()
    headers: list[PartHeader] = []
    put = HttpLink.put

    def noted(self: HttpLink, path: Path, header: PartHeader) -> Wish:
        headers.append(header)
        return put(self, path, header)

    monkeypatch.setattr(HttpLink, "put", noted)
    data = {
        "sequences": torch.tensor([[0, *PROMPT, *RESPONSE], [0, 0, 7, 8, 4, 9]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "loss_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "action_log_probs": torch.tensor([[-0.1, -0.2, -0.3], [0.0, -0.4, -0.5]]),
    }
    for _ in range(2):
        assert worker.forward_backward(data, loss_fn=None) == "metrics"
        assert worker.optim_step() == 1.0
        assert worker._medusa_tap.drain(30) and not worker._medusa_tap.problem
    assert [batch.response_ids_M.tolist() for batch in seen] == [[*RESPONSE, 4, 9]] * 2
    sampled = [(header.temperature, header.top_p, header.top_k) for header in headers]
    assert sampled == [(1.0, top_p, max(top_k, 0))] * 2
    assert [batch.policy_version for batch in seen] == [0, 1]
    expected = torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5])
    if top_p < 1:
        expected = sampled_logprobs(seen[0], lm_head_VD)
    torch.testing.assert_close(seen[0].logprobs_M, expected)
    worker._medusa_tap.close()


def test_a_cut_is_known_to_a_companion_that_drafts_from_some_tokens(
    chain_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs after top-p follow from all of lm_head: rows of it alone would be dropped."""
    monkeypatch.setenv(COMPANION_TOKEN, "a secret of this test")
    whole = torch.tensor([[*PROMPT, *RESPONSE, 4, 9, 1]])
    ones = torch.ones(1, 6)
    data = {"sequences": whole, "attention_mask": torch.ones_like(whole)}
    data |= {"response_mask": ones, "loss_mask": ones, "action_log_probs": -ones}
    with served_desk(chain_actor, tmp_path, draft_vocab=4) as served:
        monkeypatch.setenv(COMPANION, served.address)
        worker = skyrl.tapped(SkyRLWorker, top_p=0.9)(load_actor(chain_actor))
        for _ in range(3):
            before_VD = worker.model.model.lm_head.weight.detach().float().clone()
            worker.forward_backward(data)
            worker.optim_step()
            tap = worker._medusa_tap
            assert tap.drain(30) and served.desk.drain(30) and not tap.problem
            batch = served.seen[-1]
            torch.testing.assert_close(batch.logprobs_M, sampled_logprobs(batch, before_VD))
            with tap([], []):  # Asks what is wanted, now that this batch is counted.
                pass
            assert tap.drain(30)
        tap.close()
        assert served.desk._service._cycle.draft_ids is not None
        assert len(served.seen) == served.desk.status().batches_trained == 3


class Batch(dict[str, torch.Tensor]):
    """In the place of SkyRL's TrainingInputBatch."""

    def __init__(self, step: int, data: dict[str, torch.Tensor]) -> None:
        super().__init__(data)
        self.metadata = {"global_step": step}


class NotedTap:
    """In the place of CompanionTap, to which a busy companion would say that it wants no rows."""

    cuts = False

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, *rows: Any) -> contextlib.AbstractContextManager[None]:
        self.calls.append(rows)
        return contextlib.nullcontext()

    def updated(self) -> None: ...


def test_rows_are_tapped_in_the_first_of_skyrls_epochs(chain_actor: Path) -> None:
    """With trainer.update_epochs_per_batch=2 heads learned from the same rows twice, and were
    judged on what they had learned from.
    """
    worker = skyrl.tapped(SkyRLWorker)(load_actor(chain_actor))
    worker._medusa_tap = tap = NotedTap()
    ones = torch.ones(1, 3)

    def mini_batch(step: int, response: list[int]) -> Batch:
        whole = torch.tensor([[*PROMPT, *response]])
        data = {"sequences": whole, "attention_mask": torch.ones_like(whole)}
        return Batch(
            step, data | {"response_mask": ones, "loss_mask": ones, "action_log_probs": -ones}
        )

    for step in (1, 2):
        for _ in range(2):
            for response in ([1, 2, 3], [4, 5, 6]):
                worker.forward_backward(mini_batch(step, response))
                worker.optim_step()
    # In the second epoch all ranks meet in the tap as well, without rows.
    assert [responses for _, responses, _ in tap.calls] == [[[1, 2, 3]], [[4, 5, 6]], [], []] * 2
    assert all(logprobs is not None for *_, logprobs in tap.calls)


class NemoWorker:
    """In the place of NeMo-RL's: its call, over a batch that is padded on the right."""

    def __init__(self, actor: Any, **dtensor: Any) -> None:
        self.model = actor
        self.cfg = {
            "generation": {"temperature": 1.0, "top_p": 1.0, "top_k": None},
            "dtensor_cfg": dtensor,
        }

    def train(
        self,
        data: dict[str, torch.Tensor],
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
    ) -> str:
        places_T = torch.arange(data["input_ids"].shape[1])
        attention_BT = (places_T < data["input_lengths"][:, None]).long()
        self.model(
            input_ids=data["input_ids"], attention_mask=attention_BT, use_cache=False
        ).logits.mean().backward()
        return "metrics"


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 5}])
def test_nemo_rls_update_is_tapped(
    seen: list[RolloutBatch], chain_actor: Path, cut: dict[str, Any]
) -> None:
    worker = type("Tapped", (nemo_rl.TappedWorker, NemoWorker), {})(load_actor(chain_actor))
    worker.cfg["generation"] |= cut
    lm_head_VD = worker.model.lm_head.weight.detach().float()
    data = {
        "input_ids": torch.tensor(
            [[*PROMPT, *RESPONSE, 0], [7, 8, 4, 9, 0, 0], [7, 8, 4, 9, 0, 0]]
        ),
        "input_lengths": torch.tensor([5, 4, 4]),
        "token_mask": torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0]]),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "prev_logprobs": -torch.arange(18.0).view(3, 6),
    }
    assert worker.train(data, None, True) == "metrics" and "_medusa_tap" not in vars(worker)
    assert worker.train(data, None, gbs=3) == "metrics"
    assert worker._medusa_tap.drain(30) and not worker._medusa_tap.problem
    assert [batch.response_ids_M.tolist() for batch in seen] == [[*RESPONSE, 4, 9]]
    expected = torch.tensor([-2.0, -3.0, -4.0, -8.0, -9.0])
    if cut:
        expected = sampled_logprobs(seen[0], lm_head_VD)
    torch.testing.assert_close(seen[0].logprobs_M, expected)
    worker._medusa_tap.close()


def test_what_nemo_rl_cannot_be_combined_with_is_refused(
    seen: list[RolloutBatch], chain_actor: Path
) -> None:
    actor = load_actor(chain_actor)
    kind = type("Tapped", (nemo_rl.TappedWorker, NemoWorker), {})
    for settings in (
        {"tensor_parallel_size": 2},
        {"context_parallel_size": 2},
        {"lora_cfg": {"enabled": True}},
    ):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            kind(actor, **settings).train({}, None)
    with pytest.raises(AttributeError):
        nemo_rl.Another  # noqa: B018

"""Our proposer between two steps, without an engine: what it drafts, keeps, and hands to
verification when requests do not run smoothly.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from heads.checkpoint import save_state
from heads.copying import SERVED_PLACES, Texts
from heads.errors import SwapError
from heads.heads_config import TEMPERATURES, HeadsConfig
from heads.modules import Context, MedusaHeads
from heads.targets import MISSING

pytest.importorskip("vllm")

from medusa_ppo.drafting.choice import DraftChooser
from medusa_ppo.drafting.core import DraftingCore, DraftSampling
from medusa_ppo.drafting.memory import prompt_key
from medusa_ppo.drafting.products import DraftVocabulary
from medusa_ppo.drafting.running_memory import RunningMemory
from medusa_ppo.drafting.slots import DraftSlots, Seating
from medusa_ppo.drafting.stopping import Stopping
from medusa_ppo.drafting.verify import DraftRows, Rule, verify_rows
from medusa_ppo.vllm_plugin import v1_runner
from medusa_ppo.vllm_plugin.calibrating import Calibrating
from medusa_ppo.vllm_plugin.confirm import find_difference, fingerprint
from medusa_ppo.vllm_plugin.proposer import MARK, MedusaProposer
from tests.medusa_ppo.vllm_plugin.deep_sleep import tensors_of, throw_away

pytestmark = pytest.mark.usefixtures("one_rank")
D, V, K, PAIRS = 8, 10, 2, 4
CPU = torch.device("cpu")
MANY = 30_000
MOST_TOKENS = 64


class ProposerStep:
    """A proposer of hydra heads, and requests that share one state: their drafts and tokens have
    one distribution each.
    """

    def __init__(
        self,
        size: int,
        seeds: list[int | None] | None = None,
        grammar: bool = False,
        pairs: int = 0,
        copy_parts: int = 0,
        device: torch.device = CPU,
    ) -> None:
        torch.manual_seed(0)
        config = HeadsConfig(D, V, K, kind="hydra", context=pairs, copy_parts=copy_parts)
        heads = MedusaHeads(config).requires_grad_(False)
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
        heads.to(device)
        self.device = device
        self.lm_head_VD = torch.randn(V, D).to(device) / 6
        self.table_VD = torch.randn(V, D).to(device)
        self.hidden_1D = torch.randn(1, D).to(device)
        proposer: Any = object.__new__(MedusaProposer)
        proposer.device = device
        proposer.dtype = torch.float32
        proposer.hidden_size = D
        proposer.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=size),
            model_config=SimpleNamespace(max_model_len=MOST_TOKENS),
        )
        proposer.num_speculative_tokens = proposer.num_drafts = K
        proposer.sampled = True
        proposer.version = 0
        proposer.choose = False
        proposer.fed = True
        proposer.draft_temperature = 1.0
        proposer.heads = heads
        proposer.draft_vocabulary = DraftVocabulary(0, 0)
        proposer._untrained = False
        proposer._core = DraftingCore(heads, self.logits, self.embed)
        proposer._lm_head = self.logits
        proposer._embedding = lambda: self.embed
        proposer._target = torch.nn.Module()
        proposer._seating = Seating(size, device)
        proposer.chooser = DraftChooser(K)
        proposer._fingerprint = fingerprint(heads)
        proposer._slots = DraftSlots(size, K, V, device)
        proposer._use_vocabulary()
        proposer._make_ring()
        self.proposer = proposer
        self.seeds = seeds or [None] * size
        asked = SimpleNamespace(json=None) if grammar else None
        self.live = {
            str(row): SimpleNamespace(
                sampling_params=SimpleNamespace(seed=seed, structured_outputs=asked),
                prompt_token_ids=[1],
            )
            for row, seed in enumerate(self.seeds)
        }

    def logits(self, features_ND: torch.Tensor) -> torch.Tensor:
        return features_ND @ self.lm_head_VD.T

    def embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        return self.table_VD[ids_N]

    def seat(self, keys: list[str], tokens: int) -> None:
        self.proposer.seat(keys, self.live, np.full(len(keys), tokens, dtype=np.int32))

    @torch.inference_mode()
    def propose(
        self, keys: list[str], tokens: int, top_k: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.seat(keys, tokens)
        self.proposer._last_ids = [1] * len(keys)
        temperature_B = torch.ones(len(keys), device=self.device)
        sampling = SimpleNamespace(
            all_greedy=False, temperature=temperature_B, top_k=top_k, top_p=None
        )
        return self.proposer.propose(K, self.hidden_1D.expand(len(keys), D), sampling)

    @torch.inference_mode()
    def verify(
        self,
        keys: list[str],
        tokens: int,
        ids_BK: torch.Tensor,
        counts: list[int],
        p_KV: torch.Tensor,
    ) -> tuple[Any, Any]:
        """Runs and last tokens when the model's distributions are `p_KV` at each place."""
        self.seat(keys, tokens)
        flat_T = torch.cat([row_K[:count] for row_K, count in zip(ids_BK, counts, strict=True)])
        proposed = self.proposer.proposed(counts, False)
        p_KV = p_KV.to(self.device)
        logits_NV = torch.cat([p_KV[: count + 1] for count in counts]).log()
        return verify_rows(
            logits_NV, None, DraftRows.build(flat_T, counts), counts, proposed, Rule()
        )


def first_tokens(runs_B: torch.Tensor, last_B: torch.Tensor, ids_BK: torch.Tensor) -> torch.Tensor:
    return torch.where(runs_B > 0, ids_BK[:, 0], last_B)


def p_value(tokens_B: torch.Tensor, p_V: torch.Tensor) -> float:
    counts_V = torch.bincount(tokens_B, minlength=V).double().cpu()
    there_V = p_V > 0
    assert counts_V[~there_V].sum() == 0
    return float(
        chisquare(
            counts_V[there_V].numpy(),
            (p_V[there_V].double() / p_V.double().sum() * len(tokens_B)).numpy(),
        ).pvalue
    )


def targets() -> torch.Tensor:
    return torch.randn(K + 1, V, generator=torch.Generator().manual_seed(5)).softmax(-1)


def test_sampled_drafts_are_verified_against_the_q_of_their_step(device: torch.device) -> None:
    step = ProposerStep(MANY, device=device)
    keys = [str(row) for row in range(MANY)]
    p_KV = targets()
    ids_BK = step.propose(keys, 7)
    runs_B, last_B = step.verify(keys, 7, ids_BK, [K] * MANY, p_KV)
    assert p_value(first_tokens(runs_B, last_B, ids_BK), p_KV[0]) > 1e-3
    assert p_value(torch.where(runs_B == 1, last_B, ids_BK[:, 1])[runs_B > 0], p_KV[1]) > 1e-3


def test_a_q_of_another_step_is_not_believed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts of a step that was lost are verified as one-hot; with the q that lies in their
    slots they would be biased.
    """
    step = ProposerStep(MANY, device=device)
    keys = [str(row) for row in range(MANY)]
    p_KV = targets()
    step.propose(keys, 7)
    fixed_BK = torch.full((MANY, K), 3, device=device)
    runs_B, last_B = step.verify(keys, 8, fixed_BK, [K] * MANY, p_KV)
    assert p_value(first_tokens(runs_B, last_B, fixed_BK), p_KV[0]) > 1e-3
    monkeypatch.setattr(
        "medusa_ppo.vllm_plugin.proposer.stamps", lambda requests_B, positions_B: requests_B
    )
    step.propose(keys, 7)
    runs_B, last_B = step.verify(keys, 8, fixed_BK, [K] * MANY, p_KV)
    assert p_value(first_tokens(runs_B, last_B, fixed_BK), p_KV[0]) < 1e-6


def test_a_preempted_request_that_resumes_with_placeholders_samples_from_the_model(
    device: torch.device,
) -> None:
    """It drafted, was preempted, and comes back at the same length with its drafts replaced by
    -1.
    """
    step = ProposerStep(MANY, device=device)
    keys = [str(row) for row in range(MANY)]
    p_KV = targets()
    step.propose(keys, 7)
    padded_BK = torch.full((MANY, K), -1, device=device)
    runs_B, last_B = step.verify(keys, 7, padded_BK, [K] * MANY, p_KV)
    assert runs_B.sum() == 0 and p_value(last_B, p_KV[0]) > 1e-3


@pytest.mark.parametrize("grammar", [True, False])
def test_drafts_that_a_grammar_cuts_are_one_hot(device: torch.device, grammar: bool) -> None:
    """vLLM cuts a run at its first forbidden token, which depends on what was drawn. Not known to
    us as a grammar, that is biased.
    """
    step = ProposerStep(MANY, grammar=grammar, device=device)
    keys = [str(row) for row in range(MANY)]
    p_KV = targets()
    if grammar:
        # One draft for all would hide what is being tested: each request's argmax is to be another
        # one.
        step.hidden_1D = torch.randn(MANY, D).to(device)
    ids_BK = step.propose(keys, 7)
    allowed_V = torch.arange(V) % 2 == 0
    masked_KV = p_KV.clone()
    masked_KV[0, ~allowed_V] = 0
    counts = [K if allowed_V[first] else 0 for first in ids_BK[:, 0].tolist()]
    runs_B, last_B = step.verify(
        keys, 7, ids_BK, counts, masked_KV / masked_KV.sum(-1, keepdim=True)
    )
    p = p_value(first_tokens(runs_B, last_B, ids_BK), masked_KV[0])
    assert p > 1e-3 if grammar else p < 1e-6
    if grammar:
        assert ids_BK[:, 0].unique().numel() > 1 and not (step.proposer._slots.stamps_R >= 0).any()


def test_top_k_counts_in_the_vocabulary_not_in_the_drafts(device: torch.device) -> None:
    step = ProposerStep(4, device=device)
    keys = ["0", "1", "2", "3"]
    proposer = step.proposer
    proposer.draft_vocabulary = DraftVocabulary(4, V)
    proposer.draft_vocabulary.observe([[1, 3, 5, 7] * 3])
    proposer._refresh_vocabulary()
    ids_BK = step.propose(keys, 7, torch.tensor([V, 1, V, 3], dtype=torch.int32, device=device))
    assert torch.isin(ids_BK, torch.tensor([1, 3, 5, 7], device=device)).all()
    rows_B = proposer._slots.rows_S[proposer._seats.slots_B]
    q_BKW = torch.stack(
        [proposer._slots.q(rows_B, torch.full_like(rows_B, k)) for k in range(K)], dim=1
    )
    assert (q_BKW > 0).sum(-1).tolist() == [[4, 4], [1, 1], [4, 4], [3, 3]]


class Target(torch.nn.Module):
    """An actor as vLLM's models take weights."""

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in weights}


@pytest.mark.parametrize("how", ["load_weights", "worker", "nothing"])
def test_weights_that_others_load_are_noticed_before_the_next_drafts(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever brings them: rows of the draft vocabulary are those of the new lm_head, and they are
    read once, when all weights are there.
    """
    step = ProposerStep(1)
    proposer = step.proposer
    proposer.draft_vocabulary = DraftVocabulary(4, V)
    proposer.draft_vocabulary.observe([[1, 3, 5, 7] * 3])
    target = Target()
    proposer._watch(target)
    proposer._refresh_vocabulary()
    old_DW = proposer.draft_vocabulary.product(torch.eye(D))
    step.lm_head_VD = torch.randn(V, D)
    if how == "load_weights":
        for name in ("a", "b"):
            assert target.load_weights([(name, torch.zeros(1))]) == {name}
    elif how == "worker":
        runner = SimpleNamespace(drafter=proposer)
        worker = SimpleNamespace(model_runner=runner)
        assert v1_runner.with_new_weights_noticed(lambda self, given: given)(worker, 5) == 5
    assert torch.equal(proposer.draft_vocabulary.product(torch.eye(D)), old_DW)
    changed: list[int] = []
    monkeypatch.setattr(proposer.chooser, "heads_changed", lambda: changed.append(1))
    assert [proposer.wanted(K, 1) for _ in range(2)] == [K, K]
    new_DW = proposer.draft_vocabulary.product(torch.eye(D))
    if how == "nothing":
        assert torch.equal(new_DW, old_DW) and not changed
        return
    torch.testing.assert_close(new_DW, step.lm_head_VD[[1, 3, 5, 7]].T)
    assert len(changed) == 1
    target.load_weights([])
    proposer.target_changed()
    proposer.wanted(K, 1)
    assert len(changed) == 2, "who tells of them is not heard twice"


def test_seeded_requests_draft_and_verify_alike_whoever_shares_the_step(
    device: torch.device,
) -> None:
    step = ProposerStep(4, [5, None, 6, 5], device=device)
    p_KV = targets()
    together = step.propose(["1", "0", "2", "3"], 7)
    assert torch.equal(together[1], together[3])
    ends = step.verify(["1", "0", "2", "3"], 7, together, [K] * 4, p_KV)
    alone = step.propose(["0"], 7)
    assert torch.equal(alone[0], together[1])
    alone_ends = step.verify(["0"], 7, alone, [K], p_KV)
    assert [end[0] for end in alone_ends] == [end[1] for end in ends]


def test_drafting_goes_on_to_the_end() -> None:
    """Where vLLM thinks that drafts don't fit it puts K drafts of token 0 in their place."""
    hook = v1_runner.drafting_to_the_end(lambda self, common: False)
    ours = SimpleNamespace(drafter=ProposerStep(1).proposer)
    other = SimpleNamespace(drafter=object())
    assert hook(ours, object()) and not hook(ours, None) and not hook(other, object())


@pytest.mark.slow
@pytest.mark.parametrize("honest", [True, False])
def test_a_memory_and_runs_that_end_early_are_lossless(
    device: torch.device, honest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of drafts, verified against the mixture; with the heads' q alone they would be
    biased.
    """
    many = 10_000
    step = ProposerStep(many, device=device)
    keys = [str(row) for row in range(many)]
    p_KV = targets()
    for state in step.live.values():
        state.output_token_ids = [2, 3]
    step.lm_head_VD /= 4  # Flat enough for any token.
    proposer = step.proposer
    proposer.memory = RunningMemory(10**6, many, K, 64, device)
    proposer.stopping = Stopping(0.3, many, K, device)
    proposer.memory.store.remember(prompt_key([1]), [2, 3, 4, 5, 3, 6])
    if not honest:
        monkeypatch.setattr(
            DraftSlots,
            "q",
            lambda slots, rows_N, drafts_N: torch.full((len(rows_N), V), 1 / V, device=device),
        )
    step.seat(keys, 7)
    proposer.before_step([[3]] * many, [0] * many, many, step.hidden_1D.expand(many, D))
    drafts = step.propose(keys, 7)
    assert isinstance(drafts, list) and {len(ids) for ids in drafts} == {1, 2}
    ids_BK = torch.tensor([[*ids, -1][:K] for ids in drafts], device=device)
    assert (ids_BK[:, 0] == 4).float().mean() > 0.2, "it followed 2 3"
    runs_B, last_B = step.verify(keys, 7, ids_BK, [len(ids) for ids in drafts], p_KV)
    p = p_value(first_tokens(runs_B, last_B, ids_BK), p_KV[0])
    assert p > 1e-3 if honest else p < 1e-6
    second = p_value(torch.where(runs_B > 1, ids_BK[:, 1], last_B)[runs_B > 0], p_KV[1])
    assert second > 1e-3 or not honest
    counts = torch.tensor([len(ids) for ids in drafts], device=device)
    rows_T = torch.arange(int(counts.sum()), device=device)
    flat_T = torch.cat([torch.tensor(ids) for ids in drafts]).to(device)
    logits_TV = torch.cat([p_KV[:count] for count in counts.tolist()]).log().to(device)
    temperature_B = torch.ones(many, device=device)
    proposer.memory.judge(logits_TV, rows_T, flat_T, counts.tolist(), temperature_B)
    proposer.before_step(
        [[0] * (1 + run) for run in runs_B.tolist()], counts.tolist(), many, step.hidden_1D
    )
    offered, taken = proposer.memory.trust.by_length()[1]  # Behind 1 2 3, and behind 1 2 3 4.
    second_B = (ids_BK[:, 0] == 4) & (runs_B > 0) & (counts > 1)
    if honest:
        # Chances of what verification then drew.
        assert offered == pytest.approx(many + int(second_B.sum()), abs=4 * many**0.5)
        counted = int((runs_B > 0).sum() + (second_B & (runs_B > 1)).sum())
        assert taken == pytest.approx(counted, abs=4 * many**0.5)


class EngineRequest:
    """A request's states and tokens; how much of it the engine has."""

    def __init__(self, prompt: int, device: torch.device) -> None:
        self.prompt = prompt
        self.done = 0
        self.hidden_TD = torch.randn(40, D).to(device)
        self.ids_T = torch.randint(V, (40,)).to(device)
        self.prompt_ids = torch.randint(V, (prompt,)).to(device)

    @property
    def text(self) -> torch.Tensor:
        """Prompt and response so far."""
        return torch.cat([self.prompt_ids, self.ids_T[: self.done]])


class Contexts:
    """Requests of a proposer whose heads have a context, step by step; what it attends to against
    the responses themselves.
    """

    def __init__(
        self,
        device: torch.device,
        prompts: list[int],
        size: int = 3,
        pairs: int = PAIRS,
        copy_parts: int = 0,
    ) -> None:
        unseeded = [None] * len(prompts)
        self.step = ProposerStep(size, unseeded, pairs=pairs, copy_parts=copy_parts, device=device)
        self.device = device
        self.pairs = pairs
        self.responses = {
            str(row): EngineRequest(prompt, device) for row, prompt in enumerate(prompts)
        }
        self.first = dict.fromkeys(self.responses, 0)  # Pairs before it are gone.

    @torch.inference_mode()
    def run(self, accepted: dict[str, int], drafted: int = K, wanted: int = K) -> None:
        """A step in which each request got so many tokens (0: its prompt isn't finished), and
        after which so many drafts are wanted.
        """
        tokens = []
        rows = []
        for key, count in accepted.items():
            mine = self.responses[key]
            tokens.append(mine.ids_T[mine.done : mine.done + count].tolist())
            rows.append(mine.hidden_TD[mine.done : mine.done + drafted + 1])
            mine.done += count
        lengths = np.array(
            [self.responses[key].prompt + self.responses[key].done for key in accepted],
            dtype=np.int32,
        )
        self.step.proposer.seat(
            list(accepted),
            {key: self.step.live[key] for key in self.responses},
            lengths,
            self.token_ids(list(accepted)),
        )
        proposer = self.step.proposer
        proposer.before_step(tokens, [drafted] * len(tokens), 1, torch.cat(rows))
        if wanted:
            self.seen = proposer._look_back()
            self.check(accepted)
        else:
            proposer._hold()

    def token_ids(self, keys: list[str]) -> np.ndarray:
        """The tokens of requests as vLLM's input batch has them."""
        ids = np.zeros((len(keys), MOST_TOKENS), dtype=np.int32)
        for row, key in enumerate(keys):
            text = self.responses[key].text
            ids[row, : len(text)] = text.cpu().numpy()
        return ids

    def check_copies(self, accepted: dict[str, int]) -> None:
        """What is told of each request is what the heads find that were trained on its text."""
        proposer = self.step.proposer
        for row, (key, count) in enumerate(accepted.items()):
            if not count:
                continue
            mine = self.responses[key]
            lengths_1 = torch.tensor([mine.done])
            texts = Texts.of(
                mine.prompt_ids.cpu(),
                torch.tensor([mine.prompt]),
                mine.ids_T[: mine.done].cpu(),
                lengths_1,
            )
            text = texts.of_rows(lengths_1 - 1).to(self.device)
            wanted = proposer.heads._copied(text, self.step.table_VD, SERVED_PLACES)[0]
            told = self.seen.told_BKH[row]
            torch.testing.assert_close(told, wanted, rtol=1e-3, atol=1e-5)

    def check(self, accepted: dict[str, int]) -> None:
        proposer = self.step.proposer
        if self.seen is not None and self.seen.told_BKH is not None:
            self.check_copies(accepted)
            return
        last = [max(self.responses[key].done - 1, 0) for key in accepted]
        hidden_BD = torch.stack(
            [self.responses[key].hidden_TD[at] for key, at in zip(accepted, last, strict=True)]
        )
        ids_BK = torch.stack(
            [self.responses[key].ids_T[at : at + K] for key, at in zip(accepted, last, strict=True)]
        )
        sampling = DraftSampling(
            torch.ones(len(last), device=self.device),
            torch.rand(len(last), K, dtype=torch.float64, device=self.device),
        )
        drafted = proposer._core.draft(hidden_BD, ids_BK[:, 0], K, sampling, self.seen)
        for row, (key, count) in enumerate(accepted.items()):
            if count:
                mine = self.responses[key]
                at = last[row]
                rows_n = torch.arange(at - self.pairs + 1, at + 1, device=self.device)
                context = Context.of(
                    torch.where(rows_n >= self.first[key], rows_n, MISSING)[None],
                    mine.hidden_TD,
                    mine.ids_T,
                )
                logits_1KV = proposer.heads(
                    hidden_BD[row : row + 1],
                    self.step.lm_head_VD,
                    condition=torch.cat(
                        [ids_BK[row : row + 1, :1], drafted.ids_BK[row : row + 1, :-1]], dim=1
                    ),
                    embedding_VD=self.step.table_VD,
                    context=context,
                )
                torch.testing.assert_close(
                    drafted.q[-1][row], logits_1KV[0, -1].softmax(-1), rtol=1e-3, atol=1e-5
                )


@pytest.mark.parametrize("pairs", [2, PAIRS])
def test_each_request_attends_to_its_own_last_pairs(device: torch.device, pairs: int) -> None:
    """Through accepted runs of every length, prompts that take several steps, a batch that changes,
    and steps without drafts.
    """
    scene = Contexts(device, [3, 5, 0], pairs=pairs)
    scene.run({"0": 1, "1": 0}, drafted=0)
    scene.run({"1": 1, "0": 1}, drafted=0)
    scene.run({"0": 3, "1": 2})
    scene.run({"2": 1, "0": 1, "1": 3})
    scene.run({"1": 1})
    scene.run({"0": 2, "1": 1, "2": 3})
    for _ in range(4):
        scene.run({"2": 3, "1": 2, "0": 1})


def test_steps_without_drafts_make_no_keys_and_lose_no_pair(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What came while nothing was drafted is there once drafts are wanted again."""
    scene = Contexts(device, [3, 5])
    scene.run({"0": 1, "1": 1}, drafted=0)
    scene.run({"0": 2, "1": 3})
    fused = scene.step.proposer._core.fused
    made = fused.pairs
    with monkeypatch.context() as patched:
        patched.setattr(fused, "pairs", lambda *_: pytest.fail("keys were made for nobody"))
        scene.run({"0": 3, "1": 1}, wanted=0)
        scene.run({"0": 1, "1": 1}, drafted=0, wanted=0)
        scene.run({"1": 1}, drafted=0, wanted=0)
    assert fused.pairs == made
    scene.run({"0": 1, "1": 1}, drafted=0)
    scene.run({"0": 2, "1": 3})


def test_pairs_are_missing_after_a_swap_and_in_a_slot_that_was_given_on(
    device: torch.device,
) -> None:
    scene = Contexts(device, [3, 5, 2], size=2)
    scene.run({"0": 1, "1": 1}, drafted=0)
    scene.run({"0": 3, "1": 3})
    scene.step.proposer._forget_pairs()
    scene.first |= {"0": 4, "1": 4}
    scene.run({"0": 1, "1": 3})
    scene.run({"2": 1, "0": 1})  # Its slot is what "1" had, which waits.
    scene.first["1"] = scene.responses["1"].done
    scene.run({"1": 2, "2": 1})  # And now that of "0".
    scene.run({"1": 3, "2": 3})


def test_each_request_copies_from_its_own_text(device: torch.device) -> None:
    """Prompts that take several steps, steps without drafts, requests that join, wait, lose their
    slot and come back, and other heads in the middle.
    """
    scene = Contexts(device, [12, 20, 7], size=2, copy_parts=2)
    scene.run({"0": 1, "1": 0}, drafted=0)
    scene.run({"1": 1, "0": 3})
    scene.run({"0": 1, "1": 3}, wanted=0)
    scene.run({"0": 2, "1": 1})
    scene.run({"2": 1, "0": 1})  # Its slot is what "1" had, which waits.
    scene.run({"1": 3, "2": 2})  # And now that of "0".
    proposer = scene.step.proposer
    with torch.no_grad():
        proposer.heads.copy_key.neg_()
    proposer._core.load()
    proposer._forget_pairs()
    scene.run({"1": 2, "2": 3})
    scene.run({"0": 1, "2": 1})


def test_a_prompt_longer_than_what_is_kept_is_searched_in_its_last_tokens(
    device: torch.device,
) -> None:
    """All of its other tokens are never written: a prompt of 100,000 tokens costs what the window
    costs.
    """
    scene = Contexts(device, [12], copy_parts=2)
    proposer = scene.step.proposer
    ring = proposer._texts
    assert ring is not None and ring.places == MOST_TOKENS
    count = 100_000
    ids = np.random.default_rng(0).integers(V, size=(1, count)).astype(np.int32)
    proposer.seat(["0"], scene.step.live, np.array([count], dtype=np.int32), ids)
    written = []
    write = proposer._core.copier.write

    def counted(ring: Any, slots_N: torch.Tensor, *more: torch.Tensor) -> None:
        written.append(len(slots_N))
        write(ring, slots_N, *more)

    proposer._core.copier.write = counted
    told_BKH = proposer._look_up_texts(ring)
    assert sum(written) == MOST_TOKENS
    last = torch.from_numpy(ids[0, -MOST_TOKENS:]).long()
    nothing = torch.zeros(1, dtype=torch.int64)
    texts = Texts.of(last[:0], nothing, last, torch.tensor([MOST_TOKENS]))
    text = texts.of_rows(torch.tensor([MOST_TOKENS - 1])).to(device)
    wanted = proposer.heads._copied(text, scene.step.table_VD, SERVED_PLACES)[0]
    torch.testing.assert_close(told_BKH[0], wanted, rtol=1e-3, atol=1e-5)


def test_a_draft_vocabulary_without_the_copied_token_has_a_whole_q(device: torch.device) -> None:
    """q is over the map; what it lacks is never drafted, whatever was found."""
    scene = Contexts(device, [12], copy_parts=2)
    scene.run({"0": 1}, drafted=0)
    scene.run({"0": 3})
    core = scene.step.proposer._core
    ids_W = torch.tensor([1, 4, 6], device=device)
    core.use_vocabulary(ids_W, lambda features: features @ scene.step.lm_head_VD[ids_W].T)
    sampling = DraftSampling(
        torch.ones(1, device=device), torch.full((1, K), 0.99, dtype=torch.float64, device=device)
    )
    hidden_1D = torch.randn(1, D).to(device)
    drafted = core.draft(hidden_1D, torch.tensor([2], device=device), K, sampling, scene.seen)
    for q_BW in drafted.q:
        assert q_BW.shape == (1, 3)
        torch.testing.assert_close(q_BW.sum().cpu(), torch.tensor(1.0))
    assert set(drafted.ids_BK.flatten().tolist()) <= set(ids_W.tolist())


OTHER_FORMS: dict[str, dict[str, int]] = {
    "without copying": {"copy_parts": 0},
    "without a context": {"copy_parts": 0, "context": 0},
    "other parts": {"copy_parts": 3},
    "other keys": {"copy_tokens": 2},
    "feed-forward": {"feed_forward": 1},
    "another K": {"num_heads": K + 1},
    "another number of pairs": {"context": PAIRS - 1},
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_heads_of_another_form_are_refused_or_served_as_this_engine_serves(
    device: torch.device, tmp_path: Path, form: str
) -> None:
    """The number of pairs is the engine's: no tensor depends on it."""
    step = ProposerStep(2, pairs=PAIRS, copy_parts=2, device=device)
    proposer = step.proposer
    sizes = {"num_heads": K, "context": PAIRS, "copy_parts": 2} | OTHER_FORMS[form]
    torch.manual_seed(3)
    other = MedusaHeads(HeadsConfig(D, V, kind="hydra", **sizes)).requires_grad_(False)
    for parameter in other.parameters():
        parameter.copy_(torch.randn_like(parameter) / 2)
    save_state(tmp_path / "other", other.trainable_state())
    rows = torch.randn(6, D).tolist(), list(range(6))
    before = proposer.probe(*rows)
    if form == "another number of pairs":
        proposer.swap(str(tmp_path / "other"), 1)
        assert proposer.held_version() == 1 and proposer._ring.pairs == PAIRS
        assert proposer.probe(*rows) != before
        return
    with pytest.raises(SwapError, match="not those of the serving heads") as caught:
        proposer.swap(str(tmp_path / "other"), 1)
    assert "same kind, K and sizes" in str(caught.value)
    assert proposer.fed and proposer.version == 0 and proposer.probe(*rows) == before


@pytest.mark.parametrize("temperature", [1.0, 0.75])
def test_the_probe_reads_the_parameters_where_they_are(
    device: torch.device, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's tensors are on the host: to send them again took longer than the swap."""
    step = ProposerStep(2, pairs=PAIRS, copy_parts=2, device=device)
    proposer = step.proposer
    file = {name: value * 1.5 for name, value in proposer.heads.trainable_state().items()}
    if temperature != 1:
        file[TEMPERATURES] = torch.full((K,), temperature)
    save_state(tmp_path / "heads", file)
    probed: list[dict[str, torch.Tensor]] = []

    def noted(draft: Any, state: dict[str, torch.Tensor], *rest: Any) -> str:
        probed.append(dict(state))
        return find_difference(draft, state, *rest)

    monkeypatch.setattr("medusa_ppo.vllm_plugin.proposer.find_difference", noted)
    proposer.swap(str(tmp_path / "heads"), 1)
    (state,) = probed
    assert set(state) == set(file)
    for name, parameter in proposer.heads.trainable_views().items():
        assert state[name].data_ptr() == parameter.data_ptr()
        assert torch.equal(state[name].cpu(), file[name].cpu())
    if temperature != 1:
        assert torch.equal(state[TEMPERATURES].cpu(), file[TEMPERATURES])


def test_a_parameter_that_is_not_the_files_is_found_without_the_probe(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe reads the parameters, too, so it can't see that."""
    proposer = ProposerStep(2, pairs=PAIRS, copy_parts=2, device=device).proposer
    save_state(tmp_path / "heads", proposer.heads.trainable_state())
    load = MedusaHeads.load_trainable_state

    def one_number_off(heads: MedusaHeads, state: dict[str, torch.Tensor]) -> None:
        load(heads, state)
        heads.cell_step[1, 2] += 1

    monkeypatch.setattr(MedusaHeads, "load_trainable_state", one_number_off)
    with pytest.raises(SwapError, match=r"cell.step.weight does not read back"):
        proposer.swap(str(tmp_path / "heads"), 1)
    assert not proposer.fed
    monkeypatch.setattr(MedusaHeads, "load_trainable_state", load)
    proposer.swap(str(tmp_path / "heads"), 2)
    assert proposer.held_version() == 2


@pytest.mark.parametrize("copy_parts", [0, 2])
@pytest.mark.parametrize("draft_vocab", [0, V - 2])
def test_a_deep_sleep_leaves_nothing_behind(
    device: torch.device,
    copy_parts: int,
    draft_vocab: int,
    tmp_path: Path,
) -> None:
    """vLLM throws away all that was allocated while heads were loaded, and brings nobody's tensors
    back but those of modules: the ring's own numbers were gone for good, and what stood in the
    places that no request has written yet was NaN behind a mask, which is NaN.
    """
    # A request that has fewer tokens than a context has pairs reads places that nobody wrote.
    scene = Contexts(device, [2, 5], copy_parts=copy_parts)
    step = scene.step
    proposer = step.proposer
    if draft_vocab:
        proposer.draft_vocabulary = DraftVocabulary(draft_vocab, V)
        proposer.draft_vocabulary.observe([list(range(V)) * 8 * V])
        proposer._refresh_vocabulary()
        assert proposer.draft_vocabulary.ids_W is not None
    save_state(tmp_path / "heads", proposer.heads.trainable_state())
    vocabulary = proposer.draft_vocabulary
    on_the_host = vocabulary._counts_V, vocabulary._chosen_W, proposer._seating
    spared = (step, step.lm_head_VD, step.table_VD, *on_the_host)
    q_before = proposer._slots
    address = q_before.cumulative_KRX.data_ptr()
    lost = tensors_of(proposer, spared)
    assert len(lost) > 20
    throw_away(lost)
    assert proposer.held_version() == -1
    proposer.target_changed()
    proposer.swap(str(tmp_path / "heads"), 3)
    assert proposer.held_version() == 3
    left = tensors_of(proposer, (*spared, proposer._slots._scratch_2RW))
    kept = [tensor for tensor in left if tensor.is_floating_point()]
    assert not [t.shape for t in kept if not bool(t.isfinite().all())]
    slots = proposer._slots
    assert slots is q_before and slots.cumulative_KRX.data_ptr() == address
    new = DraftSlots(slots.size, K, slots.width, device, slots.ids_W)
    constants = tensors_of(slots, (slots._scratch_2RW, slots._views))
    for here, there in zip(constants, tensors_of(new, (new._scratch_2RW,)), strict=True):
        assert here.dtype == there.dtype and torch.equal(here, there)
    if draft_vocab:
        return  # What is drafted is not the whole vocabulary's, which `check` compares with.
    scene.run({"0": 1, "1": 1}, drafted=0)
    scene.run({"0": 2, "1": 3})
    scene.run({"0": 1, "1": 1}, wanted=0)
    scene.run({"0": 3, "1": 1})


@pytest.mark.parametrize("draft_vocab", [0, V - 2])
def test_the_table_of_q_stays_where_it_is_and_forgets(
    device: torch.device, draft_vocab: int, tmp_path: Path
) -> None:
    """It takes gigabytes with a large vocabulary: a second one would find no room, or lie outside
    what a sleeping engine gives away.
    """
    step = ProposerStep(3, device=device)
    proposer = step.proposer
    if draft_vocab:
        proposer.draft_vocabulary = DraftVocabulary(draft_vocab, V)
        proposer.draft_vocabulary.observe([list(range(V - 2)) * 8 * V])
        proposer._refresh_vocabulary()
    slots = proposer._slots
    assert slots.width == (draft_vocab or V)
    names = "cumulative_KRX", "columns_KR", "stamps_R", "rows_S", "_scratch_2RW", "_numbers_R"
    addresses = [getattr(slots, name).data_ptr() for name in names]
    keys = list(step.live)
    save_state(tmp_path / "heads", proposer.heads.trainable_state())

    def others() -> None:
        # Other tokens, as many.
        proposer.draft_vocabulary.observe([list(range(2, V)) * 64 * V])
        proposer.target_changed()
        if draft_vocab:
            assert slots.columns_V(V).tolist() == [-1, -1, *range(V - 2)]
            assert slots.ids_W is proposer._core.ids_W

    def swap() -> None:
        proposer.swap(str(tmp_path / "heads"), 3)

    for place, change in enumerate((proposer.target_changed, swap, others)):
        step.propose(keys, 7 + place)
        assert bool((slots.stamps_R >= 0).any())
        slots.columns_V(V)
        change()
        assert proposer._slots is slots and not bool((slots.stamps_R >= 0).any())
        assert [getattr(slots, name).data_ptr() for name in names] == addresses
    proposer.draft_vocabulary = DraftVocabulary(0, V)
    proposer._refresh_vocabulary()
    assert (proposer._slots is slots) == (not draft_vocab) and proposer._slots.width == V


def with_a_memory(device: torch.device) -> ProposerStep:
    """Seeded requests of a proposer that remembers a response and ends runs early."""
    step = ProposerStep(3, [5, 6, 7], device=device)
    step.lm_head_VD /= 4  # Flat enough for any token.
    for state in step.live.values():
        state.output_token_ids = [2, 3]
    step.proposer.memory = step.proposer._new_memory(10**6)
    step.proposer.memory.store.remember(prompt_key([1]), [2, 3, 4, 5, 3, 6])
    step.proposer.stopping = Stopping(0.3, 3, K, device)
    return step


def drafted_with_a_memory(step: ProposerStep) -> list[list[int]]:
    """Two steps' drafts, the second of which learns from those of the first."""
    proposer = step.proposer
    keys = list(step.live)
    many = len(keys)
    step.seat(keys, 7)
    proposer.before_step([[3]] * many, [0] * many, many, step.hidden_1D.expand(many, D))
    drafts = step.propose(keys, 7)
    counts = [len(ids) for ids in drafts]
    flat_T = torch.tensor([token for ids in drafts for token in ids], device=step.device)
    rows_T = torch.arange(len(flat_T), device=step.device)
    logits_TV = targets()[0].log().to(step.device).expand(len(flat_T), V)
    temperature_B = torch.ones(many, device=step.device)
    with torch.inference_mode():
        proposer.memory.judge(logits_TV, rows_T, flat_T, counts, temperature_B)
        step.seat(keys, 8)
        proposer.before_step([[4, 4]] * many, counts, many, step.hidden_1D.expand(many, D))
    more = step.propose(keys, 8)
    for rows_B in proposer._slots.rows_S[proposer._seats.slots_B].split(1):
        for k in range(K):
            q_W = proposer._slots.q(rows_B, torch.full_like(rows_B, k))[0]
            assert bool((q_W >= 0).all()) and float(q_W.sum()) == pytest.approx(1.0, abs=1e-5)
    return [*drafts, *more]


@pytest.mark.parametrize("calibrating", [False, True])
def test_a_deep_sleep_leaves_memory_and_early_ends_as_new(
    device: torch.device, calibrating: bool, tmp_path: Path
) -> None:
    """Both were made while the heads were loaded, and nobody wrote their tables again: drafts were
    drawn with a NaN, or a negative q, from then on. Compared with new ones: what is zero where it
    should not be is finite, too.
    """
    expected = drafted_with_a_memory(with_a_memory(device))
    step = with_a_memory(device)
    proposer = step.proposer
    assert drafted_with_a_memory(step) == expected
    learned = [proposer.memory, proposer.stopping]
    if calibrating:
        proposer._calibrating = Calibrating.begin(K, proposer.memory, device)
        proposer.memory = proposer._new_memory(10**6)
        learned.append(proposer.memory)
    save_state(tmp_path / "heads", proposer.heads.trainable_state())
    # Made in a step, not while the heads were loaded.
    later = proposer._seating, proposer._seats, proposer._came, proposer._sent_B
    on_the_host: list[Any] = [proposer.draft_vocabulary._counts_V, *later]
    if calibrating:
        on_the_host.append(proposer._calibrating.random_states)
    throw_away(tensors_of(proposer, (step, step.lm_head_VD, step.table_VD, *on_the_host)))
    assert proposer.held_version() == -1
    fresh = proposer._new_memory(10**6), Stopping(0.3, 3, K, device)
    for held in learned:
        new = fresh[1] if isinstance(held, Stopping) else fresh[0]
        constants = tensors_of(held)
        assert len(constants) >= 6
        for here, there in zip(constants, tensors_of(new), strict=True):
            assert here.dtype == there.dtype and torch.equal(here, there)
    if calibrating:
        proposer.memory, proposer._calibrating = proposer._calibrating.memory, None
    assert proposer.memory is learned[0] and proposer.memory.store.rows(), "it is on the host"
    proposer.target_changed()
    proposer.swap(str(tmp_path / "heads"), 3)
    proposer.memory.store.version = 0
    assert drafted_with_a_memory(step) == expected


@pytest.mark.parametrize("chosen", [True, False])
def test_drafts_of_heads_that_were_lost_meanwhile_are_verified(
    device: torch.device, chosen: bool
) -> None:
    """A swap that failed while requests run: their drafts are still verified, against a table of q
    as wide as the draft vocabulary, whether its tokens were counted or stand for them.
    """
    step = ProposerStep(3, device=device)
    proposer = step.proposer
    vocabulary = DraftVocabulary(V - 2, V, stand_in=True)
    if chosen:
        vocabulary.observe([list(range(2, V)) * 8 * V])
    proposer.draft_vocabulary = vocabulary
    proposer._refresh_vocabulary()
    ids = list(range(2, V)) if chosen else list(range(V - 2))
    before = vocabulary.ids_W
    assert before.tolist() == ids
    keys = list(step.live)
    ids_BK = step.propose(keys, 7)
    # The host's copy is all that is left of them.
    vocabulary.ids_W = proposer._slots.ids_W = before.clone().fill_(V - 1)
    for parameter in proposer.heads.parameters():
        parameter.zero_()
    assert proposer.held_version() == -1
    p_KV = torch.zeros(K + 1, V)
    p_KV[:, V - 1] = 1
    _, last_B = step.verify(keys, 7, ids_BK, [K] * 3, p_KV)
    assert last_B.tolist() == [V - 1] * 3
    assert proposer._slots.ids_W.tolist() == vocabulary.ids_W.tolist() == ids


def test_untrained_heads_whose_memory_came_back_as_zeros_are_lost(device: torch.device) -> None:
    """They are zeros themselves, and everything beside them is not: early ends, for example, then
    ended every run for good.
    """
    step = ProposerStep(3, device=device)
    proposer = step.proposer
    for parameter in proposer.heads.parameters():
        parameter.zero_()
    proposer._fingerprint = fingerprint(proposer.heads)
    proposer._mark = torch.tensor(MARK, device=device)
    proposer.stopping = Stopping(0.3, 3, K, device)
    assert proposer.held_version() == 0
    for tensor in (proposer._mark, *tensors_of(proposer.stopping)):
        tensor.zero_()
    assert proposer.held_version() == -1 and not proposer.fed
    new = tensors_of(Stopping(0.3, 3, K, device))
    for here, there in zip(tensors_of(proposer.stopping), new, strict=True):
        assert torch.equal(here, there)
    proposer.fed = True
    assert proposer.held_version() == 0, "what was renewed is not lost again"


def test_heads_with_a_context_need_its_pairs(device: torch.device) -> None:
    """Drafts that look back differ from those that do not; and nothing is looked up for heads that
    have no context.
    """
    scene = Contexts(device, [3])
    scene.run({"0": 1}, drafted=0)
    scene.run({"0": 3})
    core = scene.step.proposer._core
    seen = scene.seen
    hidden_1D = scene.responses["0"].hidden_TD[3:4]
    id_1 = scene.responses["0"].ids_T[3:4]
    sampling = DraftSampling(
        torch.ones(1, device=device), torch.zeros(1, K, dtype=torch.float64, device=device)
    )
    assert not torch.allclose(
        core.draft(hidden_1D, id_1, K, sampling, seen).q[0],
        core.draft(hidden_1D, id_1, K, sampling).q[0],
        atol=1e-3,
    )
    plain = ProposerStep(1, device=device).proposer
    plain.seat(
        ["0"],
        {"0": SimpleNamespace(sampling_params=None, prompt_token_ids=None)},
        np.array([4], dtype=np.int32),
    )
    plain.before_step([[1]], [0], 1, hidden_1D)
    assert plain._ring is None and plain._look_back() is None

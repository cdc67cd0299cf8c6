"""Packed rows give each sequence the states that it has alone, and the cache changes nothing but
the number of forward passes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM, PreTrainedModel

from medusa_ppo.actors.hf import load_actor
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.offline import hidden
from medusa_ppo.offline.collect import Sample
from medusa_ppo.offline.hidden import HiddenReader, HiddenStates, read_all

TEMPERATURE = 0.7


def nothing(*_: object) -> None:
    pass


def make_samples(count: int = 30, logprobs: bool = False) -> list[Sample]:
    """Of many lengths; every third one has two written stretches."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for number in range(count):
        length = int(torch.randint(4, 60, (1,), generator=generator))
        ids = tuple(torch.randint(0, 30, (length,), generator=generator).tolist())
        spans = ((1, 2), (3, length)) if number % 3 == 0 else ((2, length),)
        written = sum(b - a for a, b in spans)
        samples.append(Sample(ids, spans, number, (-0.5,) * written if logprobs else None))
    return samples


def assert_as_alone(model: PreTrainedModel, samples: list[Sample]) -> None:
    """Every sample's rows are those of a forward pass of its own."""
    found = HiddenReader(model, TEMPERATURE).read(samples)
    for sample, batch in zip(samples, found, strict=True):
        with torch.no_grad():
            out = model(torch.tensor([sample.ids]), output_hidden_states=True)
        rows = [t - 1 for a, b in sample.spans for t in range(a, b)]
        torch.testing.assert_close(
            batch.hidden_MD, out.hidden_states[-1][0, rows], rtol=1e-4, atol=1e-4
        )
        ids = [sample.ids[t] for a, b in sample.spans for t in range(a, b)]
        logp = torch.log_softmax(out.logits[0, rows] / TEMPERATURE, -1)[range(len(ids)), ids]
        torch.testing.assert_close(batch.logprobs_M, logp, rtol=1e-4, atol=1e-4)
        assert batch.response_ids_M.tolist() == ids and batch.lengths_S.tolist() == [
            b - a for a, b in sample.spans
        ]
        assert batch.prompts_S is not None and set(batch.prompts_S.tolist()) == {sample.prompt}


def test_packed_rows_are_those_of_a_pass_of_their_own(chain_actor: Path) -> None:
    model = load_actor(chain_actor)
    assert HiddenReader(model, TEMPERATURE).packed
    assert_as_alone(model, make_samples())


def test_learned_positions_begin_anew_with_each_sequence() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=30, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    ).eval()
    assert HiddenReader(model, TEMPERATURE).packed
    assert_as_alone(model, make_samples())


def test_a_model_that_mixes_packed_sequences_is_found_out_and_padded() -> None:
    torch.manual_seed(0)
    model = MambaForCausalLM(
        MambaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, state_size=4)
    ).eval()
    assert not HiddenReader(model, TEMPERATURE).packed
    samples = make_samples(6)
    for sample, batch in zip(samples, HiddenReader(model, TEMPERATURE).read(samples), strict=True):
        alone = HiddenReader(model, TEMPERATURE).read([sample])[0]
        torch.testing.assert_close(batch.hidden_MD, alone.hidden_MD, rtol=1e-4, atol=1e-4)


def test_known_logprobs_are_taken_and_no_logits_are_made(
    chain_actor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_actor(chain_actor)
    widths = []
    model.lm_head.register_forward_hook(lambda _module, args, _out: widths.append(args[0].shape[1]))
    batch = read_all(HiddenReader(model, TEMPERATURE), make_samples(logprobs=True), nothing)
    assert set(batch.logprobs_M.tolist()) == {-0.5} and set(widths) == {1}


def test_packing_leaves_little_of_a_row_empty() -> None:
    lengths = [len(sample.ids) for sample in make_samples(200)]
    rows = hidden._pack(lengths, 256)
    assert sorted(i for row in rows for i, _ in row) == list(range(200))
    assert sum(lengths) > 0.95 * 256 * len(rows)


def test_a_bounded_cache_gives_the_same_bits_as_a_large_one_and_as_none(chain_actor: Path) -> None:
    model = load_actor(chain_actor)
    samples = make_samples()
    reader = HiddenReader(model, 1.0)
    full = HiddenStates(reader, samples, 1 << 30, seed=0)
    groups = list(range(len(full.groups)))
    assert len(groups) > 10 and sorted(i for group in full.groups for i in group) == list(range(30))
    expected = full.batch(groups)
    half = HiddenStates(reader, samples, full.cached_bytes // 2, seed=0)
    none = HiddenStates(reader, samples, 0, seed=0)
    for states in (full, half, none):
        for order in (groups, groups[::-1]):
            states.batch(order)
        assert torch.equal(states.batch(groups).hidden_MD, expected.hidden_MD)
    assert (
        full.forwards == len(groups) and none.forwards == 3 * len(groups) and none.cached_bytes == 0
    )
    assert (
        len(groups) < half.forwards < 3 * len(groups)
        and 0 < half.cached_bytes <= full.cached_bytes // 2
    )


def test_states_are_kept_in_the_dtype_asked_for(chain_actor: Path) -> None:
    reader = HiddenReader(load_actor(chain_actor), 1.0, torch.bfloat16)
    batch = RolloutBatch.join(reader.read(make_samples(3)))
    assert batch.hidden_MD.dtype == torch.bfloat16 and batch.logprobs_M.dtype == torch.float32

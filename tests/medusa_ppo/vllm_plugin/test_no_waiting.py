"""From one forward pass to the launch of the next verification the V1 proposer and its adapter wait
for nothing on the device: under a fake CUDA device, where everything that the host tells it goes
through `sending.sent`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads

pytest.importorskip("vllm")

from medusa_ppo.drafting import sending, verify
from medusa_ppo.drafting.choice import DraftChooser
from medusa_ppo.drafting.core import DraftingCore
from medusa_ppo.drafting.products import DraftVocabulary
from medusa_ppo.drafting.slots import DraftSlots, Seating
from medusa_ppo.vllm_plugin import v1_runner
from medusa_ppo.vllm_plugin.proposer import MedusaProposer
from tests.medusa_ppo.drafting.test_host_reads import Indexing, NoReads

D, V, K, SIZE, LENGTH = 8, 12, 3, 4, 64


def proposer(context: int, copy_parts: int) -> tuple[MedusaProposer, torch.device]:
    with torch.device("cuda"):
        config = HeadsConfig(D, V, K, kind="hydra", context=context, copy_parts=copy_parts)
        heads = MedusaHeads(config).requires_grad_(False)
        lm_head_VD, table_VD = torch.zeros(V, D), torch.zeros(V, D)
    made: Any = object.__new__(MedusaProposer)
    made.device = device = lm_head_VD.device
    made.dtype, made.hidden_size = torch.float32, D
    made.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=SIZE),
        model_config=SimpleNamespace(max_model_len=LENGTH),
    )
    made.num_speculative_tokens = made.num_drafts = K
    made.sampled = made.fed = True
    made.choose = made._untrained = False
    made.heads, made.draft_temperature = heads, 1.0
    made.draft_vocabulary, made.chooser = DraftVocabulary(0, 0), DraftChooser(K)
    made._core = DraftingCore(
        heads, lambda rows: F.linear(rows, lm_head_VD), lambda ids: F.embedding(ids, table_VD)
    )
    made._seating = Seating(SIZE, device)
    made._slots = DraftSlots(SIZE, K, V, device)
    made._use_vocabulary()
    made._make_ring()
    return made, device


@pytest.mark.parametrize(("context", "copy_parts"), [(0, 0), (4, 0), (4, 2)])
@pytest.mark.parametrize("counts", [[K, K, K], [K, 0, 1]])
def test_a_v1_step_waits_for_nothing(
    context: int, copy_parts: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    def to_device(values: Any, device: torch.device, dtype: Any = torch.int64) -> torch.Tensor:
        shape = values.shape if isinstance(values, torch.Tensor) else np.shape(values)
        sent.append(shape)
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    monkeypatch.setattr(sending, "sent", to_device)
    verify._places.cache_clear()
    batch = len(counts)
    keys = [str(row) for row in range(batch)]
    asked = SimpleNamespace(seed=None, structured_outputs=None)
    live = {key: SimpleNamespace(sampling_params=asked, prompt_token_ids=[1, 2, 3]) for key in keys}
    with torch.inference_mode(), FakeTensorMode(), Indexing():
        drafter, device = proposer(context, copy_parts)
        rows = sum(counts) + batch
        with torch.device("cuda"):
            logits_TV = torch.zeros(sum(counts), V)
            bonus_B1 = torch.zeros(batch, 1, dtype=torch.int32)
            hidden_TD = torch.zeros(rows, D)
            draft_ids_T = torch.zeros(sum(counts), dtype=torch.int32)
            temperature_B = torch.ones(batch)
        sampling = SimpleNamespace(
            all_greedy=False,
            all_random=False,
            temperature=temperature_B,
            generators={},
            top_k=None,
            top_p=temperature_B,
        )
        ids = np.zeros((batch, LENGTH), dtype=np.int32)
        runner = SimpleNamespace(
            drafter=drafter,
            requests=live,
            input_batch=SimpleNamespace(
                req_ids=keys,
                num_reqs=batch,
                num_tokens_no_spec=np.full(batch, 5, dtype=np.int32),
                token_ids_cpu=ids,
                sampling_metadata=sampling,
            ),
        )
        meta = SimpleNamespace(num_draft_tokens=counts)
        with NoReads():
            for _ in range(2):
                kept = v1_runner.with_kept_draft_probs(pytest.fail)(runner, meta)
                assert isinstance(kept, verify.Proposed)
                verified = v1_runner.with_our_verification(pytest.fail)(
                    draft_ids_T, counts, K, None, kept, logits_TV, bonus_B1, sampling
                )
                assert verified.shape == (batch, K + 1) and verified.device == device
                output = SimpleNamespace(
                    scheduled_spec_decode_tokens={
                        key: [0] * count for key, count in zip(keys, counts, strict=True)
                    },
                    total_num_scheduled_tokens=rows,
                    num_spec_tokens_to_schedule=K,
                )
                drafts_BK = v1_runner.with_draft_context(stock_propose)(
                    runner, output, [[1]] * batch, hidden_TD, sample_hidden_states=hidden_TD
                )
                assert drafts_BK.shape == (batch, K) and drafts_BK.device == device
                runner.input_batch.num_tokens_no_spec += 1
    assert sent, "positions, tokens and slots went by it"
    verify._places.cache_clear()


def stock_propose(
    self: Any,
    scheduler_output: Any,
    sampled_token_ids: Any,
    hidden_states: Any,
    sample_hidden_states: Any,
) -> Any:
    """The names of vLLM's own, which is not called here."""
    return pytest.fail("our proposer drafts")

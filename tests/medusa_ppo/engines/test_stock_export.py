"""Stock vLLM on what `medusa-ppo convert --to vllm` writes: it loads, and accepts as many drafts as
the replay estimate says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.acceptance import ReplayResult
from heads.checkpoint import save_heads
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.companion.gate import replay
from medusa_ppo.companion.trainer import HeadsTrainer
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.launch import plan_launch
from medusa_ppo.offline.collect import Sample, samples_of
from medusa_ppo.offline.convert import convert
from medusa_ppo.offline.hidden import HiddenReader, read_all
from medusa_ppo.vllm_plugin.vllm_versions import has_medusa, vllm_version
from tests.medusa_ppo.conftest import cpu_alone

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not has_medusa(vllm_version()), reason="this vLLM has no Medusa"),
]

HEADS, RESPONSE_TOKENS, PER_PROMPT = 4, 96, 4
TOLERANCE = 0.03


@dataclass(frozen=True)
class Export:
    """Trained heads, the folder that stock vLLM gets, and responses that no engine of ours wrote
    and the heads did not learn from.
    """

    heads: MedusaHeads
    folder: Path
    held_out: list[Sample]


def sample_of(prompt: Sequence[int], response: Sequence[int], number: int) -> Sample:
    ids = (*prompt, *response)
    return Sample(ids, ((len(prompt), len(ids)),), number)


def sampled_by_transformers(
    model: Any, prompts: Sequence[Sequence[int]], seed: int
) -> list[Sample]:
    """Responses at temperature 1 from transformers' own generate, PER_PROMPT to each prompt."""
    torch.manual_seed(seed)
    width = max(len(prompt) for prompt in prompts)
    end = model.config.eos_token_id
    ids_BT = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": end,
        "num_return_sequences": PER_PROMPT,
    }
    out_BT = model.generate(
        input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=RESPONSE_TOKENS, **settings
    )
    samples = []
    for row, response in enumerate(out_BT[:, width:].tolist()):
        length = response.index(end) + 1 if end in response else len(response)
        samples.append(sample_of(prompts[row // PER_PROMPT], response[:length], row // PER_PROMPT))
    return samples


def replayed(
    actor: Any, heads: MedusaHeads, samples: Sequence[Sample], temperature: float = 1.0
) -> ReplayResult:
    """One-hot drafts, as stock vLLM makes them."""
    return replay(
        heads,
        read_all(HiddenReader(actor.model, temperature), samples, lambda *_: None),
        actor.lm_head_VD,
    )


@pytest.fixture(scope="module")
def export(actor: Any, tmp_path_factory: pytest.TempPathFactory) -> Export:
    folder = tmp_path_factory.mktemp("export")
    samples = sampled_by_transformers(actor.model, actor.prompts[:32], seed=1)
    heads = MedusaHeads(
        HeadsConfig(actor.model.config.hidden_size, actor.model.config.vocab_size, HEADS)
    )
    trainer = HeadsTrainer(
        heads,
        actor.lm_head_VD,
        CompanionConfig(loss="ce", learning_rate=2e-3, batch_positions=512, epochs=4),
        0,
    )
    trainer.train_batch(read_all(HiddenReader(actor.model, 1.0), samples, lambda *_: None))
    save_heads(folder / "native", heads)
    convert(folder / "native", folder / "vllm", "vllm", str(actor.path))
    return Export(
        heads, folder / "vllm", sampled_by_transformers(actor.model, actor.prompts[32:], seed=2)
    )


def test_pure_stock_vllm_accepts_what_replay_says(actor: Any, export: Export) -> None:
    """A process without our plugin, greedy (without our patches its CPU build samples wrongly),
    against the replay of the same tokens.
    """
    prompts = actor.prompts
    env = os.environ | {"VLLM_PLUGINS": "none", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    script = Path(__file__).with_name("stock_medusa.py")
    command = [
        sys.executable,
        str(script),
        str(actor.path),
        str(export.folder),
        json.dumps(prompts),
    ]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    stock = json.loads(done.stdout.splitlines()[-1])
    assert stock["drafter"] == "vllm.v1.spec_decode.medusa"
    measured = 1 + sum(stock["accepted"]) / stock["drafts"]
    samples = [
        sample_of(prompt, ids, n)
        for n, (prompt, ids) in enumerate(zip(prompts, stock["tokens"], strict=True))
    ]
    estimate = replayed(actor, export.heads, samples).mean_acceptance_length
    print(f"greedy: stock vLLM {measured:.4f}, replay {estimate:.4f}, {stock['drafts']:.0f} drafts")
    assert estimate > 1.3 and stock["drafts"] > 1000
    assert abs(measured / estimate - 1) < TOLERANCE


@cpu_alone
def test_stock_heads_at_temperature_1_accept_what_replay_says(
    actor: Any, export: Export, engine_config: EngineConfig
) -> None:
    """vLLM's own Medusa module with its CPU sampler patched, against the replay of responses that
    transformers wrote, and of its own.
    """
    plain = plan_launch(actor.path, None, engine_config, 0)
    speculation = {"method": "medusa", "model": str(export.folder), "num_speculative_tokens": HEADS}
    plan = replace(plain, engine_args=plain.engine_args | {"speculative_config": speculation})
    with ColocatedEngine(actor.path, None, engine_config, plan=plan) as engine:
        sampling = Sampling(max_new_tokens=RESPONSE_TOKENS, responses_per_prompt=PER_PROMPT, seed=3)
        rollouts = engine.generate(actor.prompts[32:], sampling)
        drafter = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    assert type(drafter).__module__ == "vllm.v1.spec_decode.medusa", (
        "the plugin leaves a folder that is not ours to vLLM"
    )
    measured = rollouts.counters.mean_acceptance_length
    estimate = replayed(actor, export.heads, export.held_out).mean_acceptance_length
    own = replayed(actor, export.heads, samples_of([rollouts])).mean_acceptance_length
    print(
        f"temperature 1: vLLM's module {measured:.4f}, replay {estimate:.4f}, replay of its own"
        f" responses {own:.4f}"
    )
    print(
        f"{rollouts.counters.drafts} drafts, {rollouts.generated_tokens} tokens; replay of"
        f" {len(export.held_out)} responses"
    )
    assert measured > 1.15 and rollouts.counters.drafts > 3000
    assert abs(measured / estimate - 1) < TOLERANCE
    assert abs(measured / own - 1) < TOLERANCE

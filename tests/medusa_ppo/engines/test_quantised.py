"""A quantised actor whose lm_head is not: heads read its states, and nothing else of it. vLLM's CPU
build computes 8-bit integers; what it can't compute is not tested, and not refused either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.checkpoint import save_heads, save_state
from heads.errors import ConfigError, SwapError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.colocated import ColocatedEngine
from medusa_ppo.engines.probe import HIDDEN, VOCAB, tiny_model

pytestmark = pytest.mark.engine
HEADS, PROMPTS = 2, 8
INTEGERS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}


def quantise(folder: Path, targets: list[str]) -> None:
    """The model's linear layers in 8 bits, as compressed-tensors writes them: a scale for each
    output channel, and one for each token's input as it comes.
    """
    path = folder / "model.safetensors"
    state = {}
    for name, tensor in load_file(path).items():
        state[name] = tensor.bfloat16()
        if name.endswith("_proj.weight") or (name == "lm_head.weight" and "lm_head" in targets):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            state[name] = (tensor / scale).round().to(torch.int8)
            state[f"{name}_scale"] = scale
    save_file(state, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    group = {
        "targets": targets,
        "weights": {**INTEGERS, "strategy": "channel", "dynamic": False},
        "input_activations": {**INTEGERS, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": [] if "lm_head" in targets else ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))


def started(folder: Path, targets: list[str]) -> ColocatedEngine:
    model = tiny_model(folder / "model")
    heads = MedusaHeads(HeadsConfig(HIDDEN, VOCAB, HEADS, kind="hydra")).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.1)
    save_heads(folder / "heads", heads, lm_head_VD=model.lm_head.weight)
    save_state(folder / "new-heads", heads.trainable_state())
    save_state(folder / "actor", model.state_dict())
    quantise(folder / "model", targets)
    config = EngineConfig(
        dtype="bfloat16",
        max_num_seqs=PROMPTS,
        max_model_len=64,
        threads=1,
        memory_fraction=0.02,
        num_drafts=HEADS,
        enforce_eager=True,
    )
    return ColocatedEngine(folder / "model", folder / "heads", config)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ColocatedEngine, Path]]:
    folder = tmp_path_factory.mktemp("quantised")
    with started(folder, ["Linear"]) as engine:
        yield engine, folder


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCAB, (PROMPTS, 8), generator=generator).tolist()


def test_drafts_change_no_token_of_a_quantised_actor(
    quantised: tuple[ColocatedEngine, Path],
) -> None:
    engine, _ = quantised
    runner = engine._running().llm_engine.model_executor.driver_worker.worker.model_runner
    assert runner.model_config.quantization == "compressed-tensors"
    greedy = Sampling(0.0, max_new_tokens=16, ignore_eos=True)
    drafting = engine.generate(prompts(), greedy)
    assert drafting.counters.drafts > 0
    engine.configure(num_drafts=0)
    plain = engine.generate(prompts(), greedy)
    engine.configure(num_drafts=HEADS)
    assert [r.token_ids for r in drafting.responses] == [r.token_ids for r in plain.responses]


def test_heads_are_swapped_and_their_drafts_confirmed(
    quantised: tuple[ColocatedEngine, Path],
) -> None:
    """With drafts from all tokens, and with the draft vocabulary's own rows of lm_head."""
    engine, folder = quantised
    sampled = Sampling(1.0, max_new_tokens=16, ignore_eos=True)
    for size in (0, VOCAB // 2):
        engine.configure(sampled=True, draft_vocab=size)
        engine.swap_heads(folder / "new-heads", 3 + size)
        rollouts = engine.generate(prompts(), replace(sampled, seed=size))
        assert rollouts.counters.accepted > 0 and rollouts.heads_version == 3 + size


def test_a_sync_is_refused_and_the_actor_stays(
    quantised: tuple[ColocatedEngine, Path],
) -> None:
    engine, folder = quantised
    greedy = Sampling(0.0, max_new_tokens=8, ignore_eos=True)
    before = engine.generate(prompts(), greedy)
    with pytest.raises(SwapError, match=r"(?s)quantised checkpoint.*compressed-tensors"):
        engine.sync_actor(folder / "actor", 1)
    after = engine.generate(prompts(), greedy)
    assert [r.token_ids for r in before.responses] == [r.token_ids for r in after.responses]


def test_a_quantised_lm_head_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantised"), started(tmp_path, ["Linear", "lm_head"]):
        pass

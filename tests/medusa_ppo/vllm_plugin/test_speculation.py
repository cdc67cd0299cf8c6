"""How an engine is told where our heads are."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.checkpoint import save_heads
from heads.errors import ConfigError, LossyError, UnsupportedVersionError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.vllm_plugin import speculation


@pytest.mark.parametrize(
    ("installed", "method"), [("0.32.0", "medusa"), ("0.33.0", "custom_class")]
)
def test_an_engine_is_told_of_the_heads_as_its_release_takes_them(
    installed: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "vllm_version", lambda: installed)
    told = speculation.speculation("/some/heads", 3, {"sampled": False})
    assert told["speculative_config"]["method"] == method
    assert told["additional_config"]["medusa_ppo_drafting"] == {"sampled": False}
    speculative = SimpleNamespace(
        **told["speculative_config"], draft_model_config=SimpleNamespace(model="/some/heads")
    )
    config = SimpleNamespace(
        speculative_config=speculative, additional_config=told["additional_config"]
    )
    assert speculation.heads_folder(config) == "/some/heads"
    assert speculation.rule_of(speculative) == "standard", "V1's kernels know no other"
    as_block = speculation.speculation("/some/heads", 3, {"sampled": False}, block=True)
    assert as_block["speculative_config"].pop("rejection_sample_method") == "block"
    assert as_block == told
    speculative.method = "ngram"
    assert speculation.heads_folder(config) == ""


def test_a_class_that_nothing_took_the_place_of_says_so() -> None:
    module, _, name = speculation.CUSTOM_CLASS.rpartition(".")
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
        model_config=SimpleNamespace(get_hidden_size=lambda: 8),
    )
    with pytest.raises(UnsupportedVersionError, match="additional_config"):
        getattr(importlib.import_module(module), name)(config).propose(
            [[1]], None, None, slot_mappings=None
        )


@pytest.mark.parametrize("rule", ["fly", "synthetic", "typical"])
def test_a_lossy_rule_is_refused_whoever_started_the_engine(rule: str) -> None:
    for lossless in ("standard", "block"):
        config = SimpleNamespace(rejection_sample_method=lossless)
        speculation.refuse_lossy_rule(speculation.rule_of(config))
    speculation.refuse_lossy_rule(speculation.rule_of(SimpleNamespace()))
    with pytest.raises(LossyError, match=rule):
        speculation.refuse_lossy_rule(
            speculation.rule_of(SimpleNamespace(rejection_sample_method=rule))
        )


SERVED: dict[str, Any] = {"pipeline_parallel_size": 1, "enable_expert_parallel": False}


@pytest.mark.parametrize(
    ("parallel", "lora", "name"),
    [
        ({"pipeline_parallel_size": 2}, None, "pipeline_parallel_size"),
        ({"enable_expert_parallel": True}, None, "enable_expert_parallel"),
        ({"enable_batch_sharded_sampling": True}, None, "enable_batch_sharded_sampling"),
        ({}, SimpleNamespace(max_loras=1), "enable_lora"),
        ({"quantization": "fp8"}, None, "quantization"),
        ({"enable_adaptive_verification": True}, None, "enable_adaptive_verification"),
    ],
)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_what_heads_lack_is_refused_in_vllms_own_process(
    parallel: dict[str, Any], lora: Any, name: str, runner: str, tmp_path: Path
) -> None:
    """Other loops start vLLM themselves, past our launcher."""
    from medusa_ppo.vllm_plugin import v1_runner
    from medusa_ppo.vllm_plugin.drafter import Drafter

    (tmp_path / "config.json").write_text('{"medusa_ppo": {}}')
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="medusa",
            draft_model_config=SimpleNamespace(model=str(tmp_path)),
            enable_adaptive_verification=parallel.get("enable_adaptive_verification", False),
        ),
        parallel_config=SimpleNamespace(**SERVED | parallel),
        model_config=SimpleNamespace(
            quantization=parallel.get("quantization"), hf_config=SimpleNamespace()
        ),
        lora_config=lora,
    )
    if runner == "v1":
        stock = object.__new__(Drafter)
        stock.vllm_config, stock.spec_config = config, config.speculative_config

        def start(self: Any) -> None:
            self.drafter = stock

        with pytest.raises(ConfigError, match=name):
            v1_runner.with_our_proposer(start)(SimpleNamespace(device=None))
        return
    speculator = pytest.importorskip("medusa_ppo.vllm_plugin.speculator")
    with pytest.raises(ConfigError, match=name):
        speculator.with_our_speculator(lambda *_: None)(config, None)


def test_a_checkpoint_with_a_quantization_of_its_own_is_served() -> None:
    own = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    config = SimpleNamespace(model_config=SimpleNamespace(quantization="fp8", hf_config=own))
    speculation.refuse_what_heads_lack(config)
    config.model_config.hf_config = SimpleNamespace()
    with pytest.raises(ConfigError, match="quantised already"):
        speculation.refuse_what_heads_lack(config)


class Head(torch.nn.Module):
    """An lm_head as one of vLLM's methods leaves it."""

    def __init__(self, **numbers: torch.Tensor | None) -> None:
        super().__init__()
        self.quant_method = SimpleNamespace()
        for name, tensor in numbers.items():
            kept = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, kept)


@pytest.mark.parametrize(
    ("numbers", "refused"),
    [
        ({"weight": torch.zeros(4, 2, dtype=torch.bfloat16)}, False),
        ({"weight": torch.zeros(4, 2)}, False),
        ({"weight": torch.zeros(0, dtype=torch.bfloat16)}, False),  # The CPU build packs it.
        ({"weight": torch.zeros(4, 2).to(torch.float8_e4m3fn)}, True),
        ({"weight": torch.zeros(2, 4, dtype=torch.int8)}, True),
        ({"weight": None, "weight_scale": torch.ones(4, 1)}, True),  # And int8.
        ({"qweight": torch.zeros(1, 4, dtype=torch.int32)}, True),
    ],
)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_quantised_lm_head_is_refused_in_vllms_own_process(
    numbers: dict[str, torch.Tensor | None], refused: bool, runner: str
) -> None:
    """Before anything of the heads is read: it is the loaded model that is looked at."""
    from medusa_ppo.vllm_plugin import proposer

    made: Any = proposer.MedusaProposer
    if runner == "v2":
        made = pytest.importorskip("medusa_ppo.vllm_plugin.speculator").HeldHeads
    drafter: Any = object.__new__(made)
    drafter.vllm_config = SimpleNamespace(speculative_config=None, additional_config={})
    target = torch.nn.Module()
    target.lm_head = Head(**numbers)
    # Without any heads it fails at the next thing, which is another error.
    with pytest.raises((ConfigError, AttributeError)) as caught:
        drafter.load_model(target)
    assert isinstance(caught.value, ConfigError) == refused
    if refused:
        assert "quantised" in str(caught.value)


def test_a_tied_lm_head_is_no_module_of_its_own() -> None:
    from medusa_ppo.vllm_plugin.target_tables import refuse_quantised_lm_head

    target = torch.nn.Module()
    target.embed_tokens = Head(weight=torch.zeros(4, 2))
    refuse_quantised_lm_head(target)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("batched", "scheduled", "said"),
    [
        (64, None, "80 tokens in a step, and vLLM schedules 64 at most"),
        (96, 70, "schedules 70 at most"),
        (80, None, ""),
        (96, 80, ""),
    ],
)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_an_engine_says_that_sequences_wait_for_room_in_a_step(
    batched: int,
    scheduled: int | None,
    said: str,
    runner: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing else shows it: with 2,048 tokens, 103 of 512 sequences stood still."""
    from medusa_ppo.vllm_plugin import proposer

    made: Any = proposer.MedusaProposer
    if runner == "v2":
        made = pytest.importorskip("medusa_ppo.vllm_plugin.speculator").HeldHeads
    hidden_size, vocab_size = 8, 12
    heads = MedusaHeads(HeadsConfig(hidden_size, vocab_size, 4, "hydra", context=4, copy_parts=2))
    save_heads(tmp_path / "heads", heads)
    told = speculation.speculation(str(tmp_path / "heads"), 4, {"sampled": True})
    draft_model = SimpleNamespace(
        model=str(tmp_path / "heads"), get_hidden_size=lambda: hidden_size
    )
    speculative = SimpleNamespace(
        **{"draft_model_config": draft_model} | told["speculative_config"]
    )
    drafter: Any = made(
        SimpleNamespace(
            speculative_config=speculative,
            additional_config=told["additional_config"],
            model_config=SimpleNamespace(
                dtype=torch.float32,
                max_model_len=64,
                hf_config=SimpleNamespace(),
                get_hidden_size=lambda: hidden_size,
                get_vocab_size=lambda: vocab_size,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=16,
                max_num_batched_tokens=batched,
                max_num_scheduled_tokens=scheduled,
            ),
        ),
        torch.device("cpu"),
    )
    target: Any = torch.nn.Module()
    target.embed_tokens = torch.nn.Embedding(vocab_size, hidden_size).requires_grad_(False)
    target.compute_logits = lambda rows: rows @ target.embed_tokens.weight.T
    drafter.load_model(target)
    assert drafter.num_drafts == 4
    warned = " ".join(record.getMessage() for record in caplog.records)
    assert (said in warned) if said else ("sequences" not in warned)

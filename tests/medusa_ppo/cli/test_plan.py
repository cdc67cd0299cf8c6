"""`medusa-ppo plan`: its sizes are those of the real things, and it starts nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from heads.errors import ModelError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.cli import app
from medusa_ppo.cli.plan import ModelSizes, companion_bytes, heads_parameters, hidden_bytes, make_plan, size_text
from medusa_ppo.config import build_config, load_config
from medusa_ppo.engines.actor_sync import actor_state
from medusa_ppo.types import RolloutBatch

FOLDER = Path(__file__).resolve().parents[3] / "configs"
CONFIGS = sorted(set(FOLDER.glob("*.yaml")) - {FOLDER / "kuberay.yaml"})  # That one is a manifest for Kubernetes.
SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)).save_pretrained(tmp_path / "actor")
    return tmp_path / "actor"


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)),
        LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=4, tie_word_embeddings=True)),
        Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)),
    ],
    ids=["llama", "llama-tied", "qwen3"],
)
def test_parameters_are_those_of_the_model(model: torch.nn.Module) -> None:
    small = sum(p.numel() for name, p in model.named_parameters() if "q_norm" in name or "k_norm" in name)  # Left out: a head's width each.
    assert ModelSizes.from_config(model.config.to_dict()).parameters == sum(p.numel() for p in model.parameters()) - small


def test_older_families_within_two_percent() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=5000, n_embd=64, n_layer=2, n_head=2, n_positions=16))
    assert ModelSizes.from_config(model.config.to_dict()).parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)


def test_what_can_not_be_planned_is_refused() -> None:
    with pytest.raises(ModelError, match="experts"):
        ModelSizes.from_config({**SMALL, "num_local_experts": 8})
    with pytest.raises(ModelError, match="lacks a size"):
        ModelSizes.from_config({"hidden_size": 4})


def test_messages_are_as_large_as_said() -> None:
    model, tokens = ModelSizes.from_config(SMALL), 7
    batch = RolloutBatch(torch.zeros(tokens, 32), torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens), torch.tensor([3, 4]))
    lengths = batch.lengths_S.numel() * 8
    assert hidden_bytes(model, tokens) == batch.nbytes - lengths
    for kind in ("medusa", "markov", "hydra"):
        for lm_head in ("shared", "own"):
            heads = HeadsConfig(32, 100, 3, kind, 2, lm_head, rank=4)
            assert heads_parameters(heads) == sum(p.numel() for p in MedusaHeads(heads).parameters())
    assert companion_bytes(HeadsConfig(32, 100, 1, "hydra"), model) > companion_bytes(HeadsConfig(32, 100, 1), model) > 0


def test_a_plan_adds_up(folder: Path) -> None:
    config = build_config({"model": {"path": str(folder)}, "engine": {"replicas": 3}, "heads": {"kind": "hydra"}})
    plan = make_plan(config, gpus=False)
    assert [(p.name, p.count) for p in plan.processes] == [("PPO loop", 1), ("engine", 3), ("companion", 1)]
    assert plan.gpus == 0 and plan.memory == sum(p.count * sum(p.parts.values()) for p in plan.processes)
    moves = {move.what: move for move in plan.moves}
    state = actor_state(LlamaForCausalLM.from_pretrained(folder))
    assert moves["actor weights"].size == sum(t.numel() * t.element_size() for t in state.values())
    assert moves["actor weights"].total == 3 * moves["actor weights"].size and "as a file" in moves["actor weights"].route
    sent = make_plan(build_config({"model": {"path": str(folder)}, "engine": {"transfer": "broadcast"}}), gpus=False)
    assert next(move for move in sent.moves if move.what == "actor weights").route == "PPO loop to each engine, broadcast in buckets"
    assert moves["lm_head and embedding"].size == 2 * 100 * 32 * 4
    assert plan.response_tokens == 32 * 4 * 96
    without = make_plan(build_config({"model": {"path": str(folder)}, "companion": {"enabled": False}}), gpus=True)
    assert [p.name for p in without.processes] == ["PPO loop", "engine"] and len(without.moves) == 2
    assert without.gpus == pytest.approx(1.1)
    assert not plan.warnings
    crowded = make_plan(build_config({"model": {"path": str(folder)}, "companion": {"queue_bytes": 1000}}), gpus=False)
    assert "companion.queue_bytes=1000" in crowded.warnings[0]
    ranks = build_config({"model": {"path": str(folder)}, "engine": {"extra": {"tensor_parallel_size": 4}, "resource": "big"}})
    engine = make_plan(ranks, gpus=True).processes[1]
    assert engine.gpus == 4 and "'big'" in engine.where and engine.parts["weights"] == plan.processes[1].parts["weights"] // 4


def test_sampled_positions_and_a_gpu_that_is_left_alone(folder: Path) -> None:
    base = {"model": {"path": str(folder)}}
    sampled = {"loss": "ce_tv", "num_gpus": 0.5, "offload": True, "positions": "fraction", "position_share": 0.25, "holdout_fraction": 0.2}
    all_of_it, part = (make_plan(build_config({**base, "companion": c}), gpus=True) for c in ({}, sampled))
    states = [{move.what: move.size for move in plan.moves}["hidden states"] for plan in (all_of_it, part)]
    tokens = part.response_tokens
    assert states[1] == round(tokens * 0.4) * 32 * 4 + tokens * (12 + 4) and states[0] == tokens * (32 * 4 + 12)
    assert "only while it trains" in part.processes[2].where and part.processes[2].gpus == 0.5
    assert "only while it trains" not in all_of_it.processes[2].where


def test_workers_of_the_companion_are_planned(folder: Path) -> None:
    settings = {"model": {"path": str(folder)}, "heads": {"kind": "hydra"}, "engine": {"replicas": 2, "placement": "spread"}}
    shared = {"num_gpus": 0.5, "epochs": 3, "batch_positions": 512, "accumulate": 2, "resource": "near", "replay_versions": 2}
    one = make_plan(build_config({**settings, "companion": shared}), gpus=True)
    config = build_config({**settings, "companion": {**shared, "workers": 3, "placement": "strict_pack"}})
    plan = make_plan(config, gpus=True)
    companion, alone = plan.processes[2], one.processes[2]
    assert (companion.name, companion.count, companion.gpus) == ("companion worker", 3, 0.5) and plan.gpus == one.gpus + 1
    assert "'near'" in companion.where and "one placement group for all (strict_pack)" in companion.where
    assert "group" not in alone.where and "one placement group for all (spread)" in plan.processes[1].where
    for what, size in alone.parts.items():
        assert companion.parts[what] == (size if what.startswith("heads") else size // 3)
    moves, before = ({move.what: move for move in p.moves} for p in (plan, one))
    assert moves["hidden states of its part"].total == pytest.approx(before["hidden states"].total, abs=3)
    assert moves["lm_head and embedding"].total == 3 * before["lm_head and embedding"].total
    steps = 3 * (32 * 4 * 96 // 1024)
    assert moves["gradients, summed"].total == 2 * 2 * steps * 4 * heads_parameters(plan.heads)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_preset_has_a_plan(path: Path, folder: Path) -> None:
    config = load_config(path, [f"model.path={folder}"])
    qwen = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps({**qwen, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True}))
    plan = make_plan(config, gpus=True)
    assert not plan.warnings, "with the model that the cluster presets name"
    cards = {"one-gpu": 1, "one-node": 8, "two-nodes": 10, "two-nodes-colocated": 16, "one-node-megatron": 8}.get(path.stem)
    assert cards is None or plan.gpus <= cards + (path.stem == "one-gpu")  # On one GPU the PPO process shares it with Ray's processes.


def test_the_command_prints_it_and_starts_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {{path: {folder}}}\n")
    code = (
        "import sys; from medusa_ppo.cli import app; from typer.testing import CliRunner\n"
        f"r = CliRunner().invoke(app, ['plan', '--config', {str(tmp_path / 'run.yaml')!r}, 'engine.replicas=2', '--no-gpus'])\n"
        "print(r.output); assert r.exit_code == 0; assert not {'torch', 'ray', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("2 x engine", "Who runs where", "hidden states: PPO loop to companion", "no GPU"):
        assert words in done.stdout


def test_the_demo_and_mistakes(tmp_path: Path) -> None:
    demo = make_plan(load_config(CONFIGS[[p.stem for p in CONFIGS].index("demo")]), gpus=False)
    assert 19e6 < demo.model.parameters < 21e6, "with the neurons that say nothing"
    (tmp_path / "run.yaml").write_text("model: {path: /no/such/folder}\n")
    result = CliRunner().invoke(app, ["plan", "--config", str(tmp_path / "run.yaml")])
    assert result.exit_code == 2


def test_sizes_read_well() -> None:
    assert [size_text(n) for n in (12, 2048, 3 * 2**20, 5 * 2**40)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 TiB"]

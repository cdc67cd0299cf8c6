"""The companion's experiment on a tiny actor: what is recorded is on-policy, and every setting
learns from the same batches.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.errors import UsageError
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.demo.task import build_tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, Path]:
    """Two PPO steps of a random actor on the embedded task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        bench = importlib.import_module("companion_defaults")
    tokenizer = build_tokenizer()
    folder = tmp_path_factory.mktemp("actor")
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), **sizes, bos_token_id=None, eos_token_id=end, pad_token_id=end
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "run.yaml").write_text(
        f"model: {{path: {folder}}}\nsampling: {{max_new_tokens: 10, responses_per_prompt: 2,"
        " temperature: 0.9}\nheads: {kind: hydra, num_heads: 2}\ncompanion: {loss: ce_tv,"
        " batch_positions: 64}\nengine: {draft_temperature: 1.0}\nppo: {prompts_per_step: 6,"
        " minibatch_size: 12, micro_batch_size: 12, epochs: 1, threads: 1, actor_learning_rate:"
        " 1.0e-2}\n"
    )
    out = folder / "recording"
    threads = torch.get_num_threads()
    bench.main(
        [
            "record",
            "--out",
            str(out),
            "--config",
            str(folder / "run.yaml"),
            "--steps",
            "4",
            "--reward",
            "numbers",
        ]
    )
    torch.set_num_threads(threads)
    return bench, out


def test_what_is_recorded_is_on_policy(recorded: tuple[ModuleType, Path]) -> None:
    """The recorded tables and states give back the log-probs that the tokens were sampled with; and
    the policy moves.
    """
    bench, out = recorded
    found = list(bench.batches(out))
    assert [batch.policy_version for batch, _, _ in found] == [0, 1, 2, 3]
    for batch, lm_head_VD, embedding_VD in found:
        logp_MV = (batch.hidden_MD @ lm_head_VD.T / batch.temperature).log_softmax(-1)
        logp_M = logp_MV.gather(1, batch.response_ids_M.unsqueeze(1)).squeeze(1)
        assert torch.allclose(logp_M, batch.logprobs_M, atol=1e-4) and embedding_VD is not None
        assert batch.lengths_S.numel() == 12 and batch.prompts_S.unique().numel() == 6
    assert not torch.equal(found[0][1], found[1][1])
    lines = json.loads((out / "recorded.json").read_text())["steps"]
    assert len(lines) == 4 and all(line["entropy"] > 0 for line in lines)
    with pytest.raises(UsageError, match="made once"):
        bench.main(["record", "--out", str(out), "--config", str(out.parent / "run.yaml")])


def test_every_setting_learns_from_it_once(
    recorded: tuple[ModuleType, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bench, out = recorded
    call = ["replay", "--out", str(out), "--only", "replay 2", "1 pass"]
    bench.main(call)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["base", "1 pass", "replay 2 versions"]
    base, once, replayed = lines
    assert len(base["serving"]) == 4 and base["serving"][0] == once["serving"][0], (
        "the first batch meets untrained heads"
    )
    assert once["rows"] < base["rows"] < replayed["rows"]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 5 and f"{base['rows']:,}" in rows[2]
    bench.main(call)
    assert len((out / "results.jsonl").read_text().splitlines()) == 3, (
        "what is done is not done again"
    )
    again = bench.learn_again(
        out, bench.build_config(json.loads((out / "recorded.json").read_text())["config"]), {}, 0
    )
    assert again["serving"] == base["serving"]


def test_the_base_is_what_a_run_has(
    recorded: tuple[ModuleType, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its learning rate was a constant, 16 times the default for an actor of width 4,096."""
    bench, out = recorded
    cycles: list[Cycle] = []
    monkeypatch.setattr(bench, "Cycle", lambda *a, **k: cycles.append(Cycle(*a, **k)) or cycles[-1])
    config = bench.build_config(json.loads((out / "recorded.json").read_text())["config"])
    for name in ("base", "half the learning rate"):
        bench.learn_again(out, config, bench.GRID[name], 0)
    defaults = CompanionConfig()
    used = cycles[0]._config
    assert {name: getattr(used, name) for name in bench.BASE} == {
        name: getattr(defaults, name) for name in bench.BASE
    }
    rates = [cycle.trainer._learning_rate for cycle in cycles]
    assert rates == [defaults.learning_rate_of(32), defaults.learning_rate_of(32) / 2]


def test_every_setting_is_one(recorded: tuple[ModuleType, Path]) -> None:
    bench, _ = recorded
    for settings in bench.GRID.values():
        keys = {key: value for key, value in settings.items() if key not in bench.NO_KEYS}
        CompanionConfig(**{**bench.BASE, **keys})

"""Rewards by name and by model; the user's mistakes in one sentence each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from heads.errors import ConfigError, DataError, ModelError, RunError
from medusa_ppo.config import PPOConfig
from medusa_ppo.ppo.rewards import CallableReward, ModelReward, find_callable, make_reward


def length(prompt: str, response: str, row: dict) -> float:
    return float(len(response)) + row.get("bonus", 0)


def test_a_callable_sees_prompt_response_and_row():
    source = CallableReward(length, "length", correct_from=3.0)
    scores = source.score(["p", "p"], ["ab", "abc"], [{"bonus": 0.5}, {}])
    assert scores.tolist() == [2.5, 3.0] and scores.dtype == torch.float32
    assert source.correct(scores).tolist() == [False, True]


def test_the_default_reward_is_found():
    source = make_reward(PPOConfig())
    rows = [{"answer": "72"}] * 2
    scores = source.score(["q"] * 2, ["so #### 72", "so #### 71"], rows)
    assert source.correct(scores).tolist() == [True, False]


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_own_rewards.py").write_text("def one(prompt, response, row):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    assert find_callable("my_own_rewards:one")("", "", {}) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("exact_answer", "module:function"),
        ("no.such.module:f", "can't be imported"),
        ("medusa_ppo.ppo.rewards:exact_anser", "Did you mean medusa_ppo.ppo.rewards:exact_answer"),
        ("os.path:join2", "no such reward function"),
        ("os:getpid", "other arguments"),
    ],
)
def test_wrong_names(name: str, says: str):
    with pytest.raises(ConfigError, match=says):
        find_callable(name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "x", None])
def test_rewards_that_are_no_finite_number(value: object):
    with pytest.raises(RunError):
        CallableReward(lambda p, r, row: value, "bad").score(["p"], ["r"], [{}])


def test_our_own_errors_pass_through():
    with pytest.raises(DataError, match="no reference answer"):
        make_reward(PPOConfig()).score(["p"], ["#### 1"], [{}])


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"[PAD]": 0, "a": 1, "b": 2, "c": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1, pad_token_id=0
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def test_a_reward_model_reads_prompt_and_response_whatever_the_batch(reward_model: Path):
    source = make_reward(PPOConfig(reward=str(reward_model)))
    prompts, responses = ["a", "ab", "c"], ["b", "cab", "a"]
    together = source.score(prompts, responses, [{}] * 3)
    alone = torch.cat([source.score([p], [r], [{}]) for p, r in zip(prompts, responses, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    model = LlamaForSequenceClassification.from_pretrained(reward_model)
    torch.testing.assert_close(together[1], model(torch.tensor([[1, 2, 3, 1, 2]])).logits[0, 0], rtol=1e-4, atol=1e-5)
    assert source.correct(together) is None, "a model's score says nothing about right and wrong"


def test_unusable_reward_models(reward_model: Path, tmp_path_factory):
    with pytest.raises(ModelError, match="can't be loaded"):
        ModelReward(str(tmp_path_factory.mktemp("empty")))
    model = LlamaForSequenceClassification.from_pretrained(reward_model, num_labels=3, ignore_mismatched_sizes=True)
    model.save_pretrained(reward_model)
    with pytest.raises(ModelError, match="one output"):
        ModelReward(str(reward_model))

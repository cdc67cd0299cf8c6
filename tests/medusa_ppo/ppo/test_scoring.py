"""Rewards by name and by model; the user's mistakes in one sentence each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from heads.errors import ConfigError, DataError, ModelError, RunError
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.ppo.rewards import (
    CallableReward,
    ModelReward,
    earned_by_steps,
    find_callable,
    make_reward,
    step_ends,
    token_texts,
)


def length(prompt: str, response: str, row: dict) -> float:
    return float(len(response)) + row.get("bonus", 0)


def test_a_callable_sees_prompt_response_and_row():
    source = CallableReward(length, "length", correct_from=3.0)
    scores = source.score(["p", "p"], ["ab", "abc"], [{"bonus": 0.5}, {}])
    assert scores.tolist() == [2.5, 3.0] and scores.dtype == torch.float32
    assert source.correct(scores).tolist() == [False, True]
    rewards_SR = torch.tensor([[2.5, 0.0, 2.5], [0.0, 3.0, 0.0]])
    assert source.correct(rewards_SR).tolist() == [False, True], "of steps the largest counts"


def test_the_default_reward_is_found():
    source = make_reward(PPOConfig())
    rows = [{"answer": "72"}] * 2
    scores = source.score(["q"] * 2, ["so #### 72", "so #### 71"], rows)
    assert source.correct(scores).tolist() == [True, False]


def test_a_module_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
        ("os:getpid", "wrong arguments"),
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
def reward_model(tmp_path: Path, save_judge) -> Path:
    save_judge(tmp_path)
    return tmp_path


@torch.no_grad()
def test_a_reward_model_reads_prompt_and_response_whatever_the_batch(reward_model: Path):
    source = make_reward(PPOConfig(reward=str(reward_model)))
    prompts = ["a", "ab", "c"]
    responses = ["b", "cab", "a"]
    together = source.score(prompts, responses, [{}] * 3)
    alone = torch.cat(
        [source.score([p], [r], [{}]) for p, r in zip(prompts, responses, strict=True)]
    )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    model = LlamaForSequenceClassification.from_pretrained(reward_model)
    torch.testing.assert_close(
        together[1], model(torch.tensor([[1, 2, 3, 1, 2]])).logits[0, 0], rtol=1e-4, atol=1e-5
    )
    assert source.correct(together) is None, "a model's score says nothing about right and wrong"


def test_unusable_reward_models(reward_model: Path, tmp_path_factory):
    with pytest.raises(ModelError, match="can't be loaded"):
        ModelReward(str(tmp_path_factory.mktemp("empty")))
    model = LlamaForSequenceClassification.from_pretrained(
        reward_model, num_labels=3, ignore_mismatched_sizes=True
    )
    model.save_pretrained(reward_model)
    with pytest.raises(ModelError, match="one output"):
        ModelReward(str(reward_model))


def texts(count: int, longest: int = 100) -> list[str]:
    drawn = random.Random(0)
    return ["".join(drawn.choices("abc", k=drawn.randrange(longest))) for _ in range(count)]


def test_the_same_text_has_the_same_reward_to_the_bit_whatever_else_is_in_the_batch(
    tmp_path: Path, save_judge
):
    save_judge(tmp_path, hidden=64)
    source = ModelReward(str(tmp_path))
    every = texts(200)
    expected = source.score([""] * 200, every, [{}] * 200)
    drawn = random.Random(1)
    for size in (1, 7, 33, 90):
        mix = drawn.sample(range(200), size)
        found = source.score([""] * size, [every[i] for i in mix], [{}] * size)
        assert torch.equal(found, expected[mix])


@pytest.mark.parametrize("by_steps", [False, True])
def test_a_text_that_is_too_long_is_an_error_or_loses_its_beginning(
    tmp_path: Path, save_judge, by_steps: bool
):
    """Its end was cut silently, where such models look."""
    save_judge(tmp_path, by_steps=by_steps)
    separator = {"step_separator": "c"} if by_steps else {}
    strict = make_reward(PPOConfig(reward=str(tmp_path), **separator))
    longest = strict._longest
    prompt, response = "a" * longest, "bacb"

    def scored(source: Any, prompts: list[str]) -> Any:
        if not by_steps:
            return source.score(prompts, [response] * len(prompts), [{}] * len(prompts)).tolist()
        steps = [["bac", "b"]] * len(prompts)
        return source.score_steps(prompts, steps, [{}] * len(prompts))

    fits = "a" * (longest - len(response))
    expected = scored(strict, [fits])
    with pytest.raises(RunError, match=rf"{longest + 4:,} tokens") as refused:
        scored(strict, ["a", prompt])
    assert "reward_too_long=cut" in str(refused.value) and f"{longest:,}" in str(refused.value)
    assert strict.cut == 0
    cuts = make_reward(PPOConfig(reward=str(tmp_path), reward_too_long="cut", **separator))
    found = scored(cuts, ["a", prompt, fits, prompt + "a"])
    assert cuts.cut == 2
    assert found[1:] == [expected[0]] * 3 and found[0] == scored(strict, ["a"])[0]
    if by_steps:
        with pytest.raises(RunError, match="too long"):
            cuts.score_steps(["a"], [["b" * longest + "c", "b"]], [{}])


@pytest.mark.parametrize("length", [30, 31, 32])
def test_a_reward_model_whose_positions_begin_after_that_of_padding(tmp_path: Path, length: int):
    """Of RoBERTa's 34 positions two are the padding's and the one before it: 32 tokens fit, and one
    place stays for padding.
    """
    letters = Tokenizer(
        models.WordLevel({"[UNK]": 0, "[PAD]": 1, "a": 2, "b": 3}, unk_token="[UNK]")
    )
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="[PAD]").save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=34,
        type_vocab_size=1,
        pad_token_id=1,
        num_labels=1,
    )
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    strict = ModelReward(str(tmp_path))
    cuts = ModelReward(str(tmp_path), cuts=True)
    text = "ab" * 16
    asked = ([text[: length - 4]], [text[length - 4 : length]], [{}])
    assert strict._longest == 31
    expected = strict.score([""], [text[max(0, length - 31) : length]], [{}])
    if length <= 31:
        assert strict.score(*asked) == expected
    else:
        with pytest.raises(RunError, match="at most 31"):
            strict.score(*asked)
    assert cuts.score(*asked) == expected and cuts.cut == (length > 31)


def test_a_template_is_what_the_model_reads(reward_model: Path):
    plain = ModelReward(str(reward_model))
    source = ModelReward(str(reward_model), template="c{prompt}b{response}ca")
    assert torch.equal(source.score(["a"], ["bb"], [{}]), plain.score(["cab"], ["bbca"], [{}]))


@pytest.mark.parametrize(
    "template", ["{response}", "{response}{prompt}", "{prompt}{response}{end}"]
)
def test_a_template_needs_prompt_and_response(reward_model: Path, template: str):
    with pytest.raises(ConfigError, match="template"):
        ModelReward(str(reward_model), template=template)


def test_a_foreign_tokenizer_is_refused(reward_model: Path):
    LlamaForSequenceClassification.from_pretrained(reward_model).resize_token_embeddings(3)
    model = LlamaForSequenceClassification.from_pretrained(reward_model)
    model.resize_token_embeddings(3)
    model.save_pretrained(reward_model)
    with pytest.raises(ModelError, match="tokenizer does not match it"):
        ModelReward(str(reward_model))


def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2's: words begin with a space, which the text's first one loses; what it
    doesn't know is bytes.
    """
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{n:02X}>": n + 2 for n in range(256)}
    vocab |= {word: 258 + n for n, word in enumerate(["▁", "a", "b", "▁a", "▁ab", "ab", "é", "."])}
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab")]
    found = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    found.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token="<unk>", eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer as GPT-2's and Qwen's: each token is bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: n for n, letter in enumerate(letters)} | {"ab": 256, "âĤ": 257}
    found = Tokenizer(models.BPE(vocab, [("a", "b"), ("â", "Ĥ")]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="</s>")


TOKENIZERS = pytest.mark.parametrize("make", [byte_fallback, byte_level])


@TOKENIZERS
def test_the_texts_of_tokens_are_together_the_text_of_the_response(make):
    tokenizer = make()
    text = " ab a, 5 € \u2013 or 漢字 and 🙂.\n\n  ab é"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    (whole,) = tokenizer.batch_decode([ids], skip_special_tokens=True)
    assert whole == text
    cases = [ids, ids[3:], ids[:-4], [], ids[:1], [*ids[:5], tokenizer.eos_token_id, *ids[5:9]]]
    for token_ids, pieces in zip(cases, token_texts(tokenizer, cases), strict=True):
        assert len(pieces) == len(token_ids)
        assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)
    pieces = token_texts(tokenizer, [ids])[0]
    assert {"€", "\u2013", "漢", "字", "🙂", ".", "é"} <= {piece.strip() for piece in pieces}
    assert pieces[-1] == "" and "\ufffd" not in "".join(pieces)


@TOKENIZERS
def test_bytes_that_are_no_text_are_texts_of_tokens_too(make):
    """An untrained policy writes them; they are decoded in small parts."""
    tokenizer = make()
    longest = 0
    decode = tokenizer.batch_decode

    def counted(rows, **how):
        nonlocal longest
        if len(rows) == 1:
            longest = max(longest, len(rows[0]))
        return decode(rows, **how)

    tokenizer.batch_decode = counted
    drawn = random.Random(0)
    cases = [[drawn.randrange(258) for _ in range(40)] for _ in range(60)]
    cases += [[130] * 500, [1] * 500]
    wholes = decode(cases, skip_special_tokens=True)
    for whole, token_ids, pieces in zip(wholes, cases, token_texts(tokenizer, cases), strict=True):
        assert "".join(pieces) == whole and len(pieces) == len(token_ids)
    assert longest <= 64


def test_a_step_is_rewarded_at_its_token_whatever_its_characters():
    """Each step ends with a newline, here the second token of its text; the euro sign is three."""
    tokenizer = byte_level()
    ids = tokenizer("€\n🙂\na")["input_ids"]
    seen = []

    def reward(prompt: str, response: str, row: dict) -> list[float]:
        seen.append(response)
        return [float(n) for n, _ in enumerate(response.split("\n"), 1)]

    source = CallableReward(reward, "steps")
    found = earned_by_steps(source, token_texts(tokenizer, [ids]), [""], [{}], "\n")
    assert seen == ["€\n🙂\na"]
    ends = [place for place, token in enumerate(ids) if tokenizer.decode([token]) in "\na"]
    assert [(place, value) for place, value in enumerate(found[0].tolist()) if value] == list(
        zip(ends, [1.0, 2.0, 3.0], strict=True)
    )


@pytest.mark.parametrize(
    "pieces, expected",
    [
        (["a", "\n", "b", "c"], [(2, 1), (4, 3)]),
        (["a", "\n", ""], [(2, 2)]),  # The end token belongs to the last step.
        (["\n", "a", "\n", "\n", "b"], [(3, 2), (5, 4)]),  # What is blank is no step.
        (["a\nb\n", "c"], [(2, 0), (4, 0), (5, 1)]),
        (["", ""], [(0, 1)]),
        (["a", "b"], [(2, 1)]),
    ],
)
def test_where_steps_end(pieces: list[str], expected: list[tuple[int, int]]):
    assert step_ends(pieces, "\n") == expected


def test_each_step_has_its_reward_at_its_last_token():
    source = CallableReward(
        lambda prompt, response, row: [len(step) for step in response.split("|") if step], "steps"
    )
    found = earned_by_steps(source, [["ab", "|", "c"], ["abc"]], ["", ""], [{}, {}], "|")
    assert found.tolist() == [[0, 2, 1], [3, 0, 0]]


def test_process_rewards_of_another_number_of_steps_are_refused():
    source = CallableReward(lambda prompt, response, row: [1.0, 2.0], "two")
    with pytest.raises(RunError, match="number of step rewards is wrong"):
        earned_by_steps(source, [["a"]], [""], [{}], "|")
    with pytest.raises(RunError, match="reward function failed"):
        earned_by_steps(CallableReward(lambda *_: 1.0, "one"), [["a"]], [""], [{}], "|")


@pytest.mark.parametrize("labels", [1, 2])
@torch.no_grad()
def test_a_process_reward_model_is_read_at_the_end_of_each_step(
    tmp_path: Path, save_judge, labels: int
):
    save_judge(tmp_path, labels, by_steps=True)
    source = make_reward(PPOConfig(reward=str(tmp_path), step_separator="c"))
    ((first, second),) = source.score_steps(["a"], [["bac", "b"]], [{}])
    logits = LlamaForTokenClassification.from_pretrained(tmp_path)(
        torch.tensor([[1, 2, 1, 3, 2]])
    ).logits[0]
    judged = logits[:, 0] if labels == 1 else logits.softmax(-1)[:, 1]
    torch.testing.assert_close(torch.tensor([first, second]), judged[[3, 4]], rtol=1e-4, atol=1e-5)

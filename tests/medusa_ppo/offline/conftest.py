"""Texts for the chain actor, and a tokenizer with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from medusa_ppo.demo.task import demo_rows

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}{% if m['role'] == 'assistant'"
    " %}{{ eos_token }}{% endif %} {% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question": row["question"]}) + "\n" for row in demo_rows("train", 0, 48)
        )
    )
    return path


@pytest.fixture
def tokenizer(chain_actor: Path) -> PreTrainedTokenizerBase:
    """Without a chat template."""
    return AutoTokenizer.from_pretrained(chain_actor)


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def chat_model(chain_actor: Path, chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """The chain actor's folder with a tokenizer that has a template."""
    model = tmp_path / "chat-model"
    model.mkdir()
    for file in chain_actor.iterdir():
        if not file.name.startswith("tokenizer"):
            (model / file.name).symlink_to(file)
    chat_tokenizer.save_pretrained(model)
    return model

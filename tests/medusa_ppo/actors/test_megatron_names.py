"""The key table: what is cut for the ranks and joined again is what it was, and a rank reads only
what is its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from heads.errors import ConfigError, ModelError
from medusa_ppo.actors.megatron_layout import (
    LOGITS,
    SEEING_FAMILIES,
    VALUE,
    Cutter,
    LlamaSizes,
    checkpoint_shapes,
    key_table,
    saved_name,
)
from medusa_ppo.actors.vision import tower_shapes
from medusa_ppo.engines.actor_sync import actor_state
from medusa_ppo.ppo.critic import Critic

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "head_dim": 6,
}


def configured(folder: Path, family: str = "llama", **settings: object) -> Path:
    config = AutoConfig.for_model(
        family, **(SMALL | {"sliding_window": None, "tie_word_embeddings": False} | settings)
    )
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_a_vision_language_actors_names_are_those_of_its_files_and_of_a_runs_checkpoint(
    vision_actor: Callable[..., Path], tmp_path: Path, family: str, tied: bool
) -> None:
    config = AutoConfig.from_pretrained(vision_actor(family))
    config.tie_word_embeddings = tied
    config.save_pretrained(tmp_path)
    sizes = LlamaSizes.read(tmp_path)
    assert (sizes.mrope_section, sizes.tied, sizes.qkv_bias) == ((4, 6, 6), tied, True)
    model = AutoModelForImageTextToText.from_config(config)
    shapes = checkpoint_shapes(sizes)
    whole = shapes | tower_shapes(vision_actor(family))
    assert whole == {name: tuple(tensor.shape) for name, tensor in actor_state(model).items()}
    memory = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {saved_name(name, sizes, LOGITS): shape for name, shape in whole.items()} == memory
    critic = {saved_name(name, sizes, VALUE) for name in checkpoint_shapes(sizes, VALUE)}
    assert critic == {name for name, _ in Critic(model).named_parameters()}


def test_a_tower_with_features_for_several_layers_is_refused(
    vision_actor: Callable[..., Path],
) -> None:
    with pytest.raises(ModelError, match=r"(?s)model_type qwen3_vl.*qwen2_5_vl.*transformers"):
        LlamaSizes.read(vision_actor("qwen3_vl"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_of_the_checkpoint_comes_back_from_its_shards(
    tmp_path: Path, family: str, ranks: int, tied: bool
) -> None:
    sizes = LlamaSizes.read(configured(tmp_path, family, tie_word_embeddings=tied))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert checkpoint_shapes(sizes) == {name: tuple(tensor.shape) for name, tensor in state.items()}

    cutters = [Cutter(sizes, rank, ranks) for rank in range(ranks)]
    found = {}
    for entry in key_table(sizes).values():
        slices = [
            [
                state[name][c.own_slice(entry, i) or slice(None)]
                for i, name in enumerate(entry.sources)
            ]
            for c in cutters
        ]
        shards = [
            cutter.merge(entry, pieces) for cutter, pieces in zip(cutters, slices, strict=True)
        ]
        assert len({shard.shape for shard in shards}) == 1, "every rank has as much"
        if entry.how != "whole":
            read = sum(piece.numel() for pieces in slices for piece in pieces)
            assert read == sum(math.prod(shape) for shape in entry.shapes), (
                "read once by all ranks together"
            )
        found |= cutters[0].join(entry, shards)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


def test_queries_keys_and_values_of_a_group_stand_together(tmp_path: Path) -> None:
    sizes = LlamaSizes.read(
        configured(
            tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=1, hidden_size=4
        )
    )
    entry = key_table(sizes)["decoder.layers.0.self_attention.linear_qkv.weight"]
    pieces = [
        torch.tensor(rows)[:, None] for rows in ([1.0, 2.0, 3.0, 4.0], [10.0, 20.0], [100.0, 200.0])
    ]
    assert Cutter(sizes, 0, 1).merge(entry, pieces).flatten().tolist() == [
        1,
        2,
        10,
        100,
        3,
        4,
        20,
        200,
    ]
    second = Cutter(sizes, 1, 2)
    own = [piece[second.own_slice(entry, i)] for i, piece in enumerate(pieces)]
    assert second.merge(entry, own).flatten().tolist() == [3, 4, 20, 200]


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("gpt2", {}, "model_type gpt2"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("mistral", {"sliding_window": 8}, "sliding_window 8"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "linear",
        ),
    ],
)
def test_what_the_table_does_not_know_is_refused(
    tmp_path: Path, family: str, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        LlamaSizes.read(configured(tmp_path, family, **settings))


def test_rotary_positions_of_llama_3(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    sizes = LlamaSizes.read(
        configured(tmp_path, rope_parameters=rope | {"original_max_position_embeddings": 8192})
    )
    assert (sizes.rope_theta, sizes.rope_factor) == (5e5, 8.0)
    with pytest.raises(ModelError, match="rotary"):
        LlamaSizes.read(
            configured(tmp_path, rope_parameters=rope | {"original_max_position_embeddings": 4096})
        )


def test_a_model_that_can_not_be_cut_is_refused(tmp_path: Path) -> None:
    sizes = LlamaSizes.read(configured(tmp_path))
    sizes.check_cut(4, 2)
    with pytest.raises(ConfigError, match="4 query groups on 8 ranks"):
        sizes.check_cut(8, 1)
    with pytest.raises(ConfigError, match="2 layers in 4 stages"):
        sizes.check_cut(1, 4)
    assert dataclasses.replace(sizes, vocab=50).vocab_rows(2) == 32

"""Roles that a run's models can't be are refused before anything is loaded: given, expected, do
this.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heads.errors import ConfigError, MedusaError, ModelError
from medusa_ppo.config.run_config import RunConfig, build_config
from medusa_ppo.ppo import role_checks, session
from medusa_ppo.ppo.placement import GIB
from medusa_ppo.ppo.role_checks import check_roles, check_room
from medusa_ppo.ppo.role_memory import LOOP, RANK
from medusa_ppo.ppo.run_progress import ProgressSink
from medusa_ppo.runtime.hardware import Hardware

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
}
JUDGE = LLAMA | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
BERT = {"model_type": "bert", "hidden_size": 16, "vocab_size": 20, "id2label": {"0": "score"}}


class Folders:
    """Model folders that hold a configuration and nothing else: whoever loads one fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str, config: dict[str, Any]) -> str:
        folder = self._folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def run_of(actor: str, roles: str = "all", /, **more: Any) -> RunConfig:
    ranks = {"backend": "megatron", "roles": roles, "tensor_parallel": 2}
    return build_config(
        {
            "model": {"path": actor, "critic_path": more.pop("critic", None)},
            "actor": ranks | more.pop("actor", {}),
            "ppo": {"reward": more.pop("reward", "json:dumps"), **more},
        }
    )


def refused(config: RunConfig, kind: type[MedusaError] = ModelError) -> tuple[str, str, str, str]:
    """What is said of a run that a session refuses: nothing was loaded, no process was started."""
    with pytest.raises(kind) as told, session.RunSession(config, ProgressSink()) as begun:
        begun.prepare(resume=False)
    error = told.value
    return str(error), str(error.given), str(error.expected), str(error.do)


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("refused too late")

    for name in ("make_reward", "load_actor", "load_tokenizer", "local_ray"):
        monkeypatch.setattr(session, name, never)


def test_models_of_one_family_and_cut_are_taken(folder: Folders) -> None:
    actor, judge = folder("actor", LLAMA), folder("judge", JUDGE)
    critic = folder("critic", LLAMA | {"hidden_size": 8, "num_hidden_layers": 1})
    for config in (
        run_of(actor, reward=judge),
        run_of(actor, reward=judge, critic=critic),
        run_of(actor, reward=judge, placement="swapped"),
        run_of(actor, "critic", critic=critic, placement="in_turn"),
        run_of(actor, reward=judge, advantages="grpo"),
        run_of(actor, "policy", reward="owner/judge"),
    ):
        check_roles(config)
    assert not run_of(actor).reward_on_ranks and run_of(actor).critic_on_ranks
    assert not run_of(actor, reward=judge, advantages="grpo").critic_on_ranks


@pytest.mark.parametrize("role", ["actor", "critic", "reward model"])
def test_a_model_of_another_family_is_refused_with_a_way_around(folder: Folders, role: str) -> None:
    path = {"actor": LLAMA, "critic": LLAMA, "reward model": JUDGE} | {role: BERT}
    config = run_of(
        folder("actor", path["actor"]),
        critic=folder("critic", path["critic"]),
        reward=folder("reward", path["reward model"]),
    )
    text, given, expected, do = refused(config)
    assert f"This {role} can't be computed by Megatron" in text
    assert "model_type bert" in given and "llama" in expected
    ways = {"actor": "backend=transformers", "critic": "roles=policy"}
    assert do == f"Set actor.{ways.get(role, 'roles=critic')}."


def test_a_vision_language_actors_sequences_are_not_split(
    vision_actor: Callable[..., Path],
) -> None:
    actor = str(vision_actor(groups=2))
    check_roles(run_of(actor, "critic"))
    text, given, expected, do = refused(
        run_of(actor, "critic", actor={"context_parallel": 2}), ConfigError
    )
    assert "vision-language actor" in text and "actor.context_parallel=2" in given
    assert expected == "actor.context_parallel=1" and "sequence_parallel" in do


@pytest.mark.parametrize("role", ["actor", "critic", "reward model"])
def test_a_model_that_can_not_be_cut_as_the_actor_is(folder: Folders, role: str) -> None:
    odd = {"num_key_value_heads": 1}
    paths = {
        name: folder(name, config | (odd if name == role else {}))
        for name, config in (("actor", LLAMA), ("critic", LLAMA), ("reward model", JUDGE))
    }
    config = run_of(paths["actor"], critic=paths["critic"], reward=paths["reward model"])
    text, given, _, do = refused(config, ConfigError)
    assert f"The {role} can't be cut" in text and given == "1 query groups on 2 ranks"
    assert "actor.tensor_parallel" in do


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("model.path", {}),
        ("model.critic_path", {"critic": "owner/name"}),
        ("ppo.reward", {"reward": "owner/name"}),
    ],
)
def test_a_hub_name_is_no_folder_that_ranks_read(
    folder: Folders, key: str, more: dict[str, str]
) -> None:
    actor = "owner/name" if key == "model.path" else folder("actor", LLAMA)
    text, given, expected, do = refused(run_of(actor, **more))
    assert "from a folder" in text and given == f"{key}=owner/name"
    assert "all nodes can read" in expected and key in do


def test_a_reward_model_of_two_outputs(folder: Folders) -> None:
    judge = folder("judge", JUDGE | {"id2label": {"0": "no", "1": "yes"}})
    text, given, expected, _ = refused(run_of(folder("actor", LLAMA), reward=judge))
    assert "exactly one output" in text and "2 labels" in given and expected == "1 label"


def test_a_reward_model_of_another_tokenizer(
    folder: Folders, tmp_path: Path, save_judge: Callable[..., None]
) -> None:
    pytest.importorskip("megatron.core")
    save_judge(tmp_path / "judge")
    file = tmp_path / "judge" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 3}))
    config = run_of(folder("actor", LLAMA), reward=str(tmp_path / "judge"))
    text, given, expected, do = refused(config)
    assert (
        "tokenizer does not match it" in text and "a tokenizer of 4 tokens, a model of 3" in given
    )
    assert "no more tokens" in expected and "tokenizer that it was trained with" in do


@pytest.mark.parametrize("roles", ["policy", "all"])
def test_a_critic_that_does_not_know_the_actors_tokens(folder: Folders, roles: str) -> None:
    """An id beyond its table would be an index error in the first step."""
    critic = folder("critic", LLAMA | {"vocab_size": 19})
    text, given, expected, do = refused(run_of(folder("actor", LLAMA), roles, critic=critic))
    assert "doesn't know all tokens" in text and "19 tokens; the actor has 20" in given
    assert "the actor's tokenizer" in expected and "model.critic_path" in do


@pytest.mark.parametrize(
    ("changed", "given"),
    [
        ({"hidden_size": 32}, "hidden_size 32 and 16"),
        ({"num_hidden_layers": 3}, "num_hidden_layers 3 and 2"),
        ({"vocab_size": 40}, "vocab_size 40 and 20"),
        ({"dtype": "bfloat16"}, "weights in bfloat16 and float32"),
    ],
)
@pytest.mark.parametrize("backend", ["transformers", "megatron"])
def test_a_reward_model_that_does_not_fit_the_critics_memory(
    folder: Folders, backend: str, changed: dict[str, Any], given: str
) -> None:
    ranks = {} if backend == "megatron" else {"backend": backend, "tensor_parallel": 1}
    config = run_of(
        folder("actor", LLAMA),
        "all" if backend == "megatron" else "policy",
        reward=folder("judge", JUDGE | changed),
        placement="swapped",
        actor=ranks,
    )
    text, told, expected, do = refused(config, ConfigError)
    assert "does not fit into the critic's memory" in text and given in told
    assert "same shapes" in expected and "in_turn" in do and "model.critic_path" in do


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"actor": {"roles": "all"}}, "A single process already holds all roles"),
        ({"actor": {"roles": "critic"}}, "A single process already holds all roles"),
        (
            {"actor": {"backend": "megatron", "roles": "critic"}, "ppo": {"advantages": "rloo"}},
            "no critic that the ranks could hold",
        ),
        (
            {
                "actor": {"backend": "megatron", "roles": "all"},
                "ppo": {"reward": "judge", "step_separator": "\n"},
            },
            "judges whole responses",
        ),
        (
            {
                "actor": {"backend": "megatron", "roles": "critic"},
                "ppo": {"reward": "judge", "placement": "swapped"},
            },
            "in the loop's process",
        ),
        (
            {
                "actor": {"backend": "megatron", "data_parallel": 2, "roles": "critic"},
                "engine": {"sleep_level": 1},
                "ppo": {"placement": "shared"},
            },
            "each rank shares its device with one of theirs",
        ),
        ({"ppo": {"placement": "swapped"}}, "reward model and a critic"),
        (
            {"ppo": {"placement": "swapped", "reward": "judge", "advantages": "rloo"}},
            "reward model and a critic",
        ),
        ({"ppo": {"placement": "in_turn", "side_by_side": True}}, "can't work in parallel"),
        (
            {"actor": {"backend": "megatron"}, "data": {"images": "image"}},
            "and the critic is not",
        ),
    ],
)
def test_keys_that_exclude_each_other(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as told:
        build_config({"sampling": {"responses_per_prompt": 2}} | values)
    assert told.value.given and told.value.expected and told.value.do


LARGE = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
"""8.0 billion parameters: 32 GB of float32 weights, and four times as much to learn."""


@pytest.mark.parametrize("backend", ["transformers", "megatron"])
@pytest.mark.parametrize("placement", ["separate", "in_turn", "shared"])
def test_roles_that_do_not_fit_are_refused_before_they_are_loaded(
    folder: Folders, monkeypatch: pytest.MonkeyPatch, backend: str, placement: str
) -> None:
    """The GPU is made up: no test machine has one."""
    found = Hardware(8, True, 4, "made up", 80 * GIB)
    monkeypatch.setattr(role_checks, "find_hardware", lambda: found)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ranks = {"backend": "megatron", "tensor_parallel": 2, "data_parallel": 2, "roles": "critic"}
    config = build_config(
        {
            "model": {"path": folder("actor", LARGE), "dtype": "bfloat16"},
            "actor": ranks if backend == "megatron" else {},
            "engine": {"sleep_level": 1, "replicas": 4},
            "ppo": {"placement": placement},
        }
    )
    if backend == "megatron" and placement != "separate":
        check_roles(config)  # 9 bytes a parameter on each rank of two.
        return
    text, given, expected, do = refused(config, ConfigError)
    where = "an actor rank" if backend == "megatron" else "the PPO loop"
    assert f"don't fit on the GPU of {where}" in text
    assert f"ppo.placement={placement}" in given and "actor" in given and "at once" in given
    assert expected.startswith("at most 80.00 GiB")
    assert ("in_turn or shared" in do) == (placement == "separate")


def test_pieces_beside_an_engine_that_shares_the_device_need_room_for_both(
    folder: Folders,
) -> None:
    """Weights of 14.96 GiB, half of them on each rank, beside 0.8 or 0.95 of 80 GiB."""

    def run(fraction: float, piece_prompts: int | None) -> RunConfig:
        return build_config(
            {
                "model": {"path": path, "dtype": "bfloat16"},
                "actor": {
                    "backend": "megatron",
                    "tensor_parallel": 2,
                    "data_parallel": 2,
                    "distributed_optimizer": True,
                    "roles": "critic",
                },
                "engine": {"sleep_level": 1, "replicas": 4, "memory_fraction": fraction},
                "ppo": {"placement": "shared", "piece_prompts": piece_prompts},
            }
        )

    path = folder("actor", LARGE)
    for fraction, pieces in ((0.8, None), (0.95, None), (0.8, 4)):
        check_room(run(fraction, pieces), RANK, 80 * GIB)
    with pytest.raises(ConfigError, match="actor rank") as told:
        check_room(run(0.95, 4), RANK, 80 * GIB)
    assert "engine 76.00" in str(told.value.given) and "piece_prompts=null" in str(told.value.do)
    check_room(run(0.95, 4), RANK, 0)  # Nothing is known of it.
    check_room(run(0.95, 4), LOOP, GIB)  # It holds no role.

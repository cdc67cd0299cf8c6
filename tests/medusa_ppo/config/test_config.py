"""Configuration: defaults, overrides, and the sentences a user reads when a key is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heads.errors import ConfigError
from medusa_ppo.companion.holdout import enough_to_hold_out
from medusa_ppo.companion.service import SAVED_EVERY
from medusa_ppo.config.actor_section import ActorConfig
from medusa_ppo.config.companion_section import HOLDOUT_SHARE
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.config.old_keys import OLD_KEYS
from medusa_ppo.config.ppo_section import PPOConfig
from medusa_ppo.config.run_config import build_config, known_keys, load_config
from medusa_ppo.config.section import Section


def test_overrides_are_typed(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("ppo: {steps: 3}\nname: from-file\n")
    config = load_config(
        file, ["ppo.clip_range=0.1", "companion.enabled=false", "model.path=some/folder"]
    )
    assert (config.ppo.steps, config.ppo.clip_range, config.companion.enabled) == (3, 0.1, False)
    assert config.model.path == "some/folder" and config.name == "from-file"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ppo.step=3", "ppo.steps"),
        ("engine.num_draft=1", "engine.num_drafts"),
        ("heads.kind=eagle", "medusa"),
        ("ppo.steps=many", "integer"),
        ("ppo.steps=0", "greater than or equal to 1"),
        ("engine.num_drafts=9", "heads.num_heads"),
        ("engine.max_model_len=64", "engine.max_model_len = 64"),
        ("engine.url=http://127.0.0.1:1", "engine.backend=URL"),
        ("engine.backend=colocate", "Did you mean colocated?"),
        ("engine.backend=http://127.0.0.1:1,http://127.0.0.1:2", "as many addresses as replicas"),
        ("engine={backend: server, sleep_level: 1}", "engine.sleep_level=null"),
        ("ppo={piece_prompts: 0}", "greater than"),
        ("ppo={piece_prompts: 33}", "at most 32"),
        ("engine={transfer: broadcast, backend: server}", "engine.backend=colocated"),
        (
            "engine={transfer: broadcast, extra: {data_parallel_size: 2}}",
            "no data_parallel_size above 1",
        ),
        ("actor.tensor_parallel=2", "actor.backend=megatron"),
        ("ppo.steps=1e3", "valid integer"),
        ("ppo.checkpoint_every=0", "ppo.checkpoint_every=null"),
        ("engine.num_drafts=-1", "greater than or equal to 0"),
        ("heads.path=", "heads.path=null"),
        ("engine={draft_vocab: -1}", "engine.draft_vocab=null"),
        ("report.trackers=wandbb", "Did you mean wandb?"),
        ("companion.cores=one,two", "valid integer"),
        ("nonsense", "key=value"),
        ("name.x.y=1", "section"),
        ("name=../other", "out=FOLDER"),
        ("name=/other", "out=FOLDER"),
    ],
)
def test_a_wrong_override_names_what_is_right(override: str, words: str) -> None:
    overrides = ["name=abc", override] if override.startswith("name.") else [override]
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert words in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("given", ["ppo.steps=3", "data.path=demo", "sampling.max_new_tokens=64"])
def test_an_engine_too_short_is_refused_where_our_loop_brings_the_prompts(given: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_model_len = 64"):
        load_config(None, ["engine.max_model_len=64", given])
    assert build_config({"engine": {"max_model_len": 64}}).engine.max_model_len == 64, (
        "another loop's prompts are its own"
    )


ALONE = ["ppo.staleness=1", "ppo.importance_bound=2"]
SHARED_RANKS = [
    "ppo.placement=shared",
    "engine.sleep_level=1",
    "actor.backend=megatron",
    "actor.tensor_parallel=2",
    "actor.roles=critic",
]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["ppo.staleness=1"], "importance weights"),
        ([*ALONE, "ppo.piece_prompts=2"], "ppo.piece_prompts=2"),
        ([*ALONE, "ppo.eval_every=2", "data.eval_split=test"], "ppo.eval_every=2"),
        ([*ALONE, "engine.sleep_level=1"], "engine.sleep_level=1"),
        ([*ALONE, "report.speed_every=4"], "report.speed_every=4"),
        ([*ALONE, "report.compare_pairs=3"], "report.compare_pairs=3"),
        (["ppo.carry_after=0.5"], "begun by an older actor"),
        ([*ALONE, "ppo.carry_after=0.5", "engine.backend=server"], "engine.backend=server"),
        ([*ALONE, "ppo.carry_after=0.5", "engine.replicas=2"], "engine.replicas=2"),
        ([*ALONE, "ppo.carry_after=0.5", "data.images=image"], "data.images=image"),
        ([*ALONE, "ppo.carry_after=0.5", "ppo.piece_prompts=2"], "ppo.piece_prompts=2"),
        (
            [*ALONE, "ppo.carry_after=0.5", "ppo.staleness=2", "engine.sleep_level=1"],
            "engine.sleep_level=1",
        ),
    ],
)
def test_what_writing_ahead_needs_and_refuses(overrides: list[str], words: str) -> None:
    assert (
        load_config(None, ALONE).ppo.staleness == 1
        and not load_config(None, ALONE).has_budget
        and load_config().has_budget
    )
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert words in str(error.value)


def test_carried_over_with_one_update_nothing_is_written_ahead() -> None:
    """The engine rests between two steps: it can be asked, and sleep."""
    beside = ["engine.sleep_level=1", "ppo.eval_every=2", "data.eval_split=test"]
    ppo = load_config(None, [*ALONE, "ppo.carry_after=0.5", *beside]).ppo
    assert ppo.steps_ahead == 0 and ppo.model_copy(update={"carry_after": None}).steps_ahead == 1


@pytest.mark.parametrize(
    "engines",
    [
        ["engine.replicas=2"],
        ["engine.extra={tensor_parallel_size: 2}"],
        ["engine.replicas=2", "ppo.piece_prompts=2"],
        ["engine.replicas=2", "ppo.reward=a/judge", "actor.roles=all"],
    ],
)
def test_ranks_share_their_devices_with_as_many_of_engines(engines: list[str]) -> None:
    assert load_config(None, [*SHARED_RANKS, *engines]).ppo.placement == "shared"
    plain = ["ppo.placement=shared", "engine.sleep_level=2", engines[0]]
    assert load_config(None, plain).ppo.placement == "shared", "and the loop's with any number"


def test_pieces_go_together_with_an_engine_that_sleeps() -> None:
    beside = ["engine.sleep_level=1", "ppo.placement=shared", "report.compare_pairs=null"]
    assert load_config(None, ["ppo.piece_prompts=2", *beside]).ppo.piece_prompts == 2


@pytest.mark.parametrize(
    "key",
    [
        "ppo.piece_prompts=2",
        "ppo.recompute=true",
        "ppo.recompute=attention",
        "ppo.micro_batch_tokens=9",
        "model.dtype=bfloat16",
    ],
)
def test_what_a_megatron_actor_takes(key: str) -> None:
    load_config(None, ["actor.backend=megatron", key])


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("name=on", "on"),
        ("name=12", "12"),
        ("ppo.actor_learning_rate=1e-5", 1e-5),
        ("companion.enabled=off", False),
        ("report.trackers=wandb,ray", ("wandb", "ray")),
        ("report.trackers=[wandb, ray]", ("wandb", "ray")),
        ("report.trackers=[]", ()),
        ("companion.cores=4,5", (4, 5)),
        ("companion.cores=null", None),
        ("engine.sleep_level=2", 2),
        ("engine.dtype=null", None),
        ("engine.extra={seed: 3}", {"seed": 3}),
        ("engine.extra.seed=3", {"seed": 3}),
        (r'data.template="{question}\n"', "{question}\n"),
    ],
)
def test_an_override_is_read_by_the_type_of_its_field(override: str, value: Any) -> None:
    found: Any = load_config(None, [override])
    for name in override.partition("=")[0].split(".")[:2]:
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


def test_a_file_extends_another_and_says_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text(
        "extends: one-gpu\nname: below\nengine: {extra: {a: 1, b: 1}}\n"
    )
    (tmp_path / "above.yaml").write_text(
        "extends: ./below.yaml\nengine: {max_num_seqs: 3, extra: {b: 2}}\ncompanion: {num_gpus:"
        " null}\n"
    )
    config = load_config(tmp_path / "above.yaml", ["ppo.steps=1"])
    assert (config.name, config.engine.max_num_seqs, config.engine.extra) == (
        "below",
        3,
        {"a": 1, "b": 2},
    )
    assert (
        config.ppo.prompts_per_step == 64
        and config.companion.num_gpus is None
        and config.ppo.steps == 1
    )


def test_what_can_not_be_extended_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for text, words in (
        ("extends: ./b.yaml", "a.yaml -> b.yaml -> a.yaml"),
        ("extends: nosuch", "preset does not exist"),
        ("extends: ./nosuch.yaml", "does not exist"),
        ("extends: [one-gpu]", "must name one preset"),
    ):
        file.write_text(text)
        (tmp_path / "b.yaml").write_text("extends: a.yaml")
        with pytest.raises(ConfigError, match=words):
            load_config(file)


@pytest.mark.parametrize(
    "pairs, words",
    [
        (
            ["ppo.advantages=grpo", "sampling.responses_per_prompt=1"],
            "no others to be compared with",
        ),
        (["ppo.advantages=rloo", "ppo.step_separator=x"], "no rewards for single steps"),
        (["ppo.kl_in_loss=true"], "k1 has a gradient of zero"),
        (["ppo.kl_goal=0.1", "ppo.kl_coefficient=0"], "stays 0"),
        (["ppo.ptx_coefficient=1"], "both the texts and their weight"),
        (["ppo.eval_every=1", "data.eval_split=train"], "use the training prompts"),
        (["ppo.recompute=attention"], "keeps no activations that could be recomputed"),
        (["actor.backend=megatron", "actor.sequence_parallel=true"], "needs tensor parallelism"),
        (["actor.distributed_optimizer=true"], "can't distribute its optimizer"),
        (
            ["actor.backend=megatron", "actor.context_parallel=2", "sampling.top_k=5"],
            "mask is lost",
        ),
        (["engine.memory_bytes=100", "engine.draft_temperature=0"], "Only sampled drafts"),
        (["engine.stop_below=0.1", "engine.draft_temperature=0"], "Only sampled drafts"),
        (["engine.stop_below=0.1"], "its own number"),
    ],
)
def test_options_of_the_update_that_contradict_each_other(pairs: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, pairs)


@pytest.mark.parametrize(
    "other",
    [
        "engine.backend=server",
        "engine.runner=v2",
        "model.critic_path=some/folder",
        "ppo.piece_prompts=2",
        "report.keep_rollouts=1",
    ],
)
def test_what_can_not_see_images_is_refused(other: str) -> None:
    key = other.partition("=")[0]
    with pytest.raises(
        ConfigError, match=f"(?s)data.images=image, {key}=.*Set {key}=.*data.images=null"
    ):
        load_config(None, ["data.images=image", other])


def test_the_number_of_drafts_is_auto_or_a_number() -> None:
    def found(value: str) -> EngineConfig:
        return load_config(None, [f"engine.num_drafts={value}"]).engine

    assert load_config(None).engine.num_drafts == "auto"
    shown = {value: (found(value).most_drafts, found(value).chooses_drafts) for value in "02"}
    assert shown == {"0": (0, False), "2": (2, False)}
    for value in ("auto", "null"):
        assert (found(value).num_drafts, found(value).most_drafts) == ("auto", None)
        assert found(value).chooses_drafts
    assert EngineConfig.model_validate({"num_drafts": None}).chooses_drafts
    assert load_config(None, ["engine.runner=v2"]).engine.chooses_drafts
    for wrong in ("many", "1.5", "-1"):
        with pytest.raises(ConfigError, match=r"engine\.num_drafts"):
            found(wrong)
    with pytest.raises(ConfigError, match=r"engine\.num_drafts has a wrong value"):
        build_config({"engine": {"num_drafts": -1}})


def test_heads_from_a_folder_have_their_own_number() -> None:
    """The engine's start refuses more drafts than these."""
    found = load_config(None, ["engine.num_drafts=6", "heads.path=folder/of-eight"])
    assert found.engine.most_drafts == 6
    with pytest.raises(ConfigError, match=r"heads\.num_heads"):
        load_config(None, ["engine.num_drafts=6"])


def test_cut_responses_is_a_word_or_a_number() -> None:
    assert [
        load_config(None, [f"ppo.cut_responses={value}"]).ppo.cut_responses
        for value in ("mask", "0.5", "null")
    ] == ["mask", 0.5, None]
    with pytest.raises(ConfigError):
        load_config(None, ["ppo.cut_responses=often"])


def test_a_preset_is_found_by_its_name_wherever_a_command_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("two-nodes", ["name=x"]).engine.replicas == 7
    (tmp_path / "two-nodes").write_text("engine: {replicas: 3}")
    assert load_config("two-nodes").engine.replicas == 3, "a file of this folder comes first"
    with pytest.raises(ConfigError, match="preset does not exist"):
        load_config("three-nodes")
    with pytest.raises(ConfigError, match="an absolute one"):
        load_config("configs/two-nodes.yaml")


@pytest.mark.parametrize("key", OLD_KEYS)
def test_a_key_of_an_earlier_release_says_what_says_it_now(key: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    (tmp_path / "old.yaml").write_text(f"{section}: {{{name}: 1}}\n")
    assert key not in known_keys()
    for load in (
        lambda: load_config(None, [f"{key}=1"]),
        lambda: load_config(tmp_path / "old.yaml"),
    ):
        with pytest.raises(ConfigError) as error:
            load()
        assert key in str(error.value.given) and error.value.do == OLD_KEYS[key]
    named = re.findall(
        r"\b(?:actor|data|engine|heads|companion|ppo|report)\.[a-z_]+", OLD_KEYS[key]
    )
    assert set(named) <= set(known_keys()), "what it names exists"


def test_what_old_keys_say_of_the_companion_is_what_it_does() -> None:
    held = OLD_KEYS["companion.holdout_fraction"]
    least = next(count for count in range(100) if enough_to_hold_out(count, HOLDOUT_SHARE))
    assert f"fewer than {least} prompts" in held and "a fifth" in held.lower()
    assert HOLDOUT_SHARE == 1 / 5
    assert f"{SAVED_EVERY} batches" in OLD_KEYS["companion.checkpoint_every"]


def test_a_missing_or_broken_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1,")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(broken)
    broken.write_text("- 1\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(broken)


def test_the_config_is_frozen_and_every_field_is_documented() -> None:
    config = load_config()
    with pytest.raises(Exception, match="frozen"):
        config.ppo.steps = 5  # type: ignore[misc]
    for key in known_keys():
        section = type(config)
        *parents, leaf = key.split(".")
        for parent in parents:
            section = section.model_fields[parent].annotation
        said = section.model_fields[leaf].description
        assert said, f"{key} has no docstring"
        assert re.search(r"\bSet\s+it\b", said), f"{key} does not say when to touch it"


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: EngineConfig(sleep_level=1, backend="server"), "engine.sleep_level=1"),
        (lambda: PPOConfig(piece_prompts=33), "ppo.piece_prompts=33, ppo.prompts_per_step=32"),
        (lambda: ActorConfig(distributed_optimizer=True), "actor.backend=transformers"),
    ],
)
def test_a_section_by_itself_keeps_its_own_rules(build: Callable[[], Section], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert words in str(error.value)


@pytest.mark.parametrize(
    "pairs, words",
    [
        (["ppo.advantages=grpo", "model.critic_path=demo"], "use no critic"),
        (
            ["ppo.side_by_side=true", "actor.backend=megatron"],
            "already work in parallel with the critic",
        ),
        (["ppo.side_by_side=true", "ppo.placement=shared"], "can't work in parallel"),
        (["ppo.placement=shared"], "stays awake"),
        ([*SHARED_RANKS, "engine.replicas=3"], "2 ranks and the engines have 3"),
        (SHARED_RANKS, "2 ranks and the engines have 1"),
        ([*SHARED_RANKS, "engine.replicas=2", "actor.roles=policy"], "critic would be"),
        ([*SHARED_RANKS, "engine.replicas=2", "ppo.reward=a/judge"], "reward model would be"),
        ([*SHARED_RANKS, "engine.replicas=2", "engine.resource=near"], "on the ranks' nodes"),
        (
            [*SHARED_RANKS, "engine.replicas=2", "engine.transfer=broadcast"],
            "can't broadcast to each other",
        ),
        ([*SHARED_RANKS, "engine.replicas=2", "engine.sleep_level=null"], "stays awake"),
        (
            [*SHARED_RANKS, "engine.replicas=2", "ppo.staleness=1", "ppo.importance_bound=2"],
            "it does nothing else",
        ),
        (["engine.backend=http://127.0.0.1:1", "report.compare_pairs=1"], "on your server"),
    ],
)
def test_sections_that_contradict_each_other(pairs: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, pairs)

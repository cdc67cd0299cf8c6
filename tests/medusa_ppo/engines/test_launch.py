"""Bad input is refused before an engine starts, with a sentence that names it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from heads.checkpoint import save_heads
from heads.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    LossyError,
    MedusaError,
    ModelError,
    UnsupportedVersionError,
)
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.engine_section import EngineConfig
from medusa_ppo.contract.rollouts import Counters, Sampling
from medusa_ppo.engines import launch
from medusa_ppo.engines import rollout_engine as engine
from medusa_ppo.engines.http_server import parse_counters, server_arguments
from medusa_ppo.engines.launch import plan_launch, process_environment, reading_s, stop_ids
from medusa_ppo.engines.pieces import request_seed
from medusa_ppo.vllm_plugin import vllm_versions
from medusa_ppo.vllm_plugin.worker_calls import first_of, raise_reported, reports_errors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {"model_type": "llama", "hidden_size": 8, "vocab_size": 16, "eos_token_id": [3, 4]}
        )
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    return folder


def heads_folder(path: Path, hidden: int = 8, vocab: int = 16, count: int = 3, **more: Any) -> Path:
    save_heads(
        path,
        MedusaHeads(HeadsConfig(hidden, vocab, count, **more)),
        lm_head_VD=torch.zeros(vocab, hidden),
    )
    return path


def test_plan(model: Path, tmp_path: Path) -> None:
    plan = plan_launch(model, heads_folder(tmp_path / "heads"), EngineConfig(num_drafts=2), seed=7)
    assert plan.stop_ids == (5, 3, 4)
    assert (plan.max_drafts, plan.drafting["num_drafts"]) == (3, 2)
    assert plan.engine_args["speculative_config"]["num_speculative_tokens"] == 3
    assert plan.engine_args["logprobs_mode"] == "processed_logprobs"
    plain = plan_launch(model, None, EngineConfig(), seed=7)
    assert (plain.max_drafts, plain.drafting["num_drafts"]) == (0, 0)
    assert "speculative_config" not in plain.engine_args


def test_a_large_model_gets_time_to_be_read(model: Path) -> None:
    assert plan_launch(model, None, EngineConfig(), 0).load_s == 0
    for part in range(2):
        with open(model / f"{part}.safetensors", "wb") as file:
            file.truncate(70 * 10**9)  # It has no blocks.
    assert plan_launch(model, None, EngineConfig(), 0).load_s == reading_s(model) == 2800


def test_a_vision_language_model_gets_what_images_need(model: Path) -> None:
    assert plan_launch(model, None, EngineConfig(), 0).engine_args["skip_tokenizer_init"]
    text = {"hidden_size": 8, "vocab_size": 16, "eos_token_id": 3}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text}))
    plan = plan_launch(model, None, EngineConfig(), 0)
    assert not plan.engine_args["skip_tokenizer_init"] and plan.engine_args[
        "limit_mm_per_prompt"
    ] == {"video": 0}
    assert plan.vocab_size == 16 and plan.stop_ids == (5, 3)


def test_a_large_vocabulary_is_drafted_from_in_part(model: Path, tmp_path: Path) -> None:
    size = 40_000
    (model / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 8, "vocab_size": size, "eos_token_id": 3})
    )
    heads = heads_folder(tmp_path / "heads", vocab=size)
    plan = plan_launch(model, heads, EngineConfig(), 0)
    assert plan.drafting["draft_vocab"] == 8192
    own = plan.engine_args["additional_config"]["medusa_ppo_drafting"]
    assert own["draft_vocab"] == 8192, "vLLM profiles memory before it is configured"
    assert plan_launch(model, heads, EngineConfig(draft_vocab=0), 0).drafting["draft_vocab"] == 0
    assert "draft_vocab" not in plan_launch(model, None, EngineConfig(), 0).drafting


@pytest.mark.parametrize("listed", ["tokenizer.json", "tokenizer_config.json"])
def test_a_response_ends_at_the_tokenizers_end_token_too(model: Path, listed: str) -> None:
    tokens = [{"id": 9, "content": "<end>"}, {"id": 8, "content": "<pad>"}]
    settings = {"eos_token": {"content": "<end>"} if listed == "tokenizer.json" else "<end>"}
    if listed == "tokenizer.json":
        (model / listed).write_text(json.dumps({"added_tokens": tokens}))
    else:
        settings["added_tokens_decoder"] = {
            str(token["id"]): {"content": token["content"]} for token in tokens
        }
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert plan_launch(model, None, EngineConfig(), seed=7).stop_ids == (5, 3, 4, 9)


def test_of_a_hub_name_the_same_files_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only config.json was: responses of chat models ran on to the limit. The hub is a double: no
    test has a network.
    """
    tokens = [{"id": 9, "content": "<end>"}]
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))

    def fetched(name: str, file: str, **_: object) -> str | None:
        assert name == "someone/actor"
        return str(model / file) if (model / file).is_file() else None

    monkeypatch.setattr(transformers.utils, "cached_file", fetched)
    text = json.loads((model / "config.json").read_text())
    assert stop_ids("someone/actor", text) == stop_ids(model, text) == (5, 3, 4, 9)
    (model / "generation_config.json").unlink()
    assert stop_ids("someone/actor", text) == (3, 4, 9)


def test_a_broadcast_needs_the_transfer_api_of_a_checked_version(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(transfer="broadcast")
    monkeypatch.setattr(vllm_versions, "vllm_version", lambda: "0.32.0")
    assert plan_launch(model, None, config, 0).engine_args["weight_transfer_config"] == {
        "backend": "medusa_ppo"
    }
    assert "weight_transfer_config" not in plan_launch(model, None, EngineConfig(), 0).engine_args
    with pytest.raises(ConfigError, match=r"engine\.transfer sets it"):
        plan_launch(model, None, EngineConfig(extra={"weight_transfer_config": {}}), 0)
    monkeypatch.setattr(vllm_versions, "vllm_version", lambda: "0.31.0")
    with pytest.raises(UnsupportedVersionError, match="transfer=file"):
        plan_launch(model, None, config, 0)


@pytest.mark.parametrize("path", ["no/such/folder", "./nothing", "nowhere"])
def test_missing_model(path: str) -> None:
    with pytest.raises(ModelError) as caught:
        plan_launch(path, None, EngineConfig(), 0)
    assert caught.value.exit_code == 2


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        plan_launch(tmp_path, None, EngineConfig(), 0)


@pytest.mark.parametrize(
    ("hidden", "vocab", "name"), [(4, 16, "hidden_size 4"), (8, 32, "vocab_size 32")]
)
def test_heads_of_another_actor(
    model: Path, tmp_path: Path, hidden: int, vocab: int, name: str
) -> None:
    with pytest.raises(CheckpointError, match=name):
        plan_launch(model, heads_folder(tmp_path / "heads", hidden, vocab), EngineConfig(), 0)


def test_missing_and_foreign_heads(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no heads directory"):
        plan_launch(model, tmp_path / "nothing", EngineConfig(), 0)
    (tmp_path / "config.json").write_text('{"model_type": "medusa"}')
    with pytest.raises(CheckpointError, match="not a native"):
        plan_launch(model, tmp_path, EngineConfig(), 0)


def test_more_drafts_than_heads(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more drafts"):
        plan_launch(model, heads_folder(tmp_path / "heads"), EngineConfig(num_drafts=4), 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3},
        {"rejection_sample_method": "typical"},
        {"rejection_sample_method": "fly"},
    ],
)
def test_lossy_acceptance_is_refused(model: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(LossyError, match="distribution") as caught:
        plan_launch(model, None, EngineConfig(extra={"speculative_config": settings}), 0)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"speculative_config": {"synthetic_acceptance_rates": [0.9]}}, "speculative_config"),
        ({"speculative_config": {"posterior_threshold": 0.1}}, "speculative_config"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode"),
        ({"worker_extension_cls": "a.B"}, "worker_extension_cls"),
        ({"async_scheduling": True}, "async_scheduling"),
        ({"enable_lora": True}, "enable_lora"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"quantization": "fp8"}, "quantization"),
    ],
)
def test_what_cannot_be_combined_is_named(
    model: Path, tmp_path: Path, extra: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=name):
        plan_launch(model, heads_folder(tmp_path / "heads"), EngineConfig(extra=extra), 0)


def test_steps_are_scheduled_ahead_where_runs_of_drafts_do_not_end_early(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to the plugin, unless somebody asks for one or the other."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    heads = heads_folder(tmp_path / "heads")

    def planned(**settings: Any) -> Any:
        config = EngineConfig(runner="v2", **settings)
        return plan_launch(model, heads, config, 0).engine_args.get("async_scheduling")

    assert planned() is None
    for asked in (True, False):
        assert planned(extra={"async_scheduling": asked}) is asked
    early = {"stop_below": 0.1, "num_drafts": 1}
    assert planned(**early) is False
    with pytest.raises(ConfigError, match="how many drafts it verifies is known too late"):
        planned(**early, extra={"async_scheduling": True})


GROUP: dict[str, Any] = {"weights": {"num_bits": 8}}


@pytest.mark.parametrize(
    ("quantised", "refused"),
    [
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, True),
        ({"quant_method": "gptq", "bits": 4, "lm_head": False}, False),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, False),
        ({"config_groups": {"all": {**GROUP, "targets": ["Linear"]}}, "ignore": []}, False),
        ({"config_groups": {"head": {**GROUP, "targets": ["lm_head"]}}, "ignore": []}, True),
        ({"config_groups": {"head": {**GROUP, "targets": ["re:.*lm_head"]}}}, True),
        (
            {"config_groups": {"all": {**GROUP, "targets": ["re:.*"]}}, "ignore": ["lm_head"]},
            False,
        ),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_that_says_it_has_a_quantised_lm_head(
    model: Path, tmp_path: Path, quantised: dict[str, Any], refused: bool, nested: bool
) -> None:
    """Layers below it may be quantised: heads read states."""
    path = model / "config.json"
    sizes = {"hidden_size": 8, "vocab_size": 16, "eos_token_id": 3}
    own: dict[str, Any] = {**sizes, "quantization_config": quantised}
    whole = {"model_type": "qwen3_vl", "text_config": own} if nested else {"model_type": "llama"}
    path.write_text(json.dumps(whole if nested else {**whole, **own}))
    heads = heads_folder(tmp_path / "heads")
    if refused:
        with pytest.raises(ConfigError, match="quantised"):
            plan_launch(model, heads, EngineConfig(), 0)
    else:
        plan_launch(model, heads, EngineConfig(extra={"quantization": "fp8"}), 0)
    assert plan_launch(model, None, EngineConfig(), 0).max_drafts == 0, "without heads it may be"


def test_a_runner_that_the_environment_asks_for_must_be_the_engines(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "vllm_version", lambda: "0.32.0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match=r"engine\.runner=v2"):
        plan_launch(model, heads_folder(tmp_path / "heads"), EngineConfig(), 0)
    plan = plan_launch(model, heads_folder(tmp_path / "heads"), EngineConfig(runner="v2"), 0)
    assert plan.environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@pytest.mark.parametrize("runner", [None, "v1", "v2"])
@pytest.mark.parametrize(
    ("version", "cpu"), [("0.24.0", False), ("0.32.0", True)], ids=["an old vLLM", "a CPU build"]
)
@pytest.mark.parametrize("others_start", [True, False])
def test_what_the_error_advises_where_v2_cannot_be_had_leads_to_a_start(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runner: Any,
    version: str,
    cpu: bool,
    others_start: bool,
) -> None:
    """No two errors that name each other's settings: only without the variable does it start."""
    monkeypatch.setattr(launch, "vllm_version", lambda: version)
    monkeypatch.setattr(launch, "is_cpu_build", lambda: cpu)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    heads = heads_folder(tmp_path / "heads")

    def planned(runner: Any) -> launch.LaunchPlan:
        return plan_launch(model, heads, EngineConfig(runner=runner), 0, others_start=others_start)

    with pytest.raises((UnsupportedVersionError, ConfigError)) as caught:
        planned(runner)
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in str(caught.value.given)
    advised = str(caught.value.do)
    assert advised.startswith("Unset VLLM_USE_V2_MODEL_RUNNER")
    assert "engine.runner=v2" not in advised, "V2 can't be had here"
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    left = None if "leave engine.runner out" in advised else runner
    assert planned(left).runner == "v1"


def test_which_model_runner(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """V1, and V2 where it is asked for and can be had, or by itself where its drafting is recorded
    as CUDA graphs.
    """
    heads = heads_folder(tmp_path / "heads")
    context = heads_folder(tmp_path / "context", kind="hydra", context=4)

    def runner(heads: Path = heads, **settings: Any) -> str:
        return plan_launch(model, heads, EngineConfig(**settings), 0).runner

    monkeypatch.setattr(launch, "vllm_version", lambda: "0.32.0")
    assert runner() == "v1" and plan_launch(model, None, EngineConfig(), 0).runner == ""
    with pytest.raises(UnsupportedVersionError, match="CPU build"):
        runner(runner="v2")
    monkeypatch.setattr(launch, "is_cpu_build", lambda: False)
    assert (runner(), runner(runner="v2"), runner(context, runner="v2")) == ("v1", "v2", "v2")
    everything: dict[str, Any] = {"draft_vocab": 8, "stop_below": 0.1, "memory_bytes": 1000}
    assert runner(runner="v2", num_drafts=2, **everything) == "v2"
    recorded: dict[str, Any] = {"enforce_eager": False}
    assert runner(**recorded, runner="v1") == "v1" and "interpreter" not in caplog.text
    assert runner(**recorded) == "v2" and "doctor --distribution" in caplog.text
    assert runner(**recorded, sleep_level=1) == "v1" == runner(**recorded, transfer="broadcast")
    assert runner(**recorded, extra={"tensor_parallel_size": 2}) == "v1"

    def of_others(**settings: Any) -> str:
        config = EngineConfig(**recorded, **settings)
        return plan_launch(model, heads, config, 0, others_start=True).runner

    caplog.clear()
    assert of_others(sleep_level=1) == "v1" and not caplog.text
    assert of_others() == "v1", "vLLM follows the environment, which is not ours to set"
    assert "Set VLLM_USE_V2_MODEL_RUNNER=1 where the loop" in caplog.text
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        of_others(runner="v2")
    with monkeypatch.context() as environment:
        environment.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        assert of_others() == "v2" == of_others(runner="v2")
        with pytest.raises(ConfigError, match="different model runner"):
            of_others(runner="v1")
    monkeypatch.setattr(launch, "vllm_version", lambda: "0.26.0")
    caplog.clear()
    assert runner() == "v1" == of_others() and not caplog.text, "it has no other"
    with pytest.raises(UnsupportedVersionError, match=r"0\.26"):
        runner(runner="v2")


@pytest.mark.parametrize(
    ("prompts", "word"),
    [
        ([], "no prompt"),
        ([[]], "empty or too long"),
        ([[1] * 60], "empty or too long"),
        ([[1, 99]], "outside the vocabulary"),
    ],
)
def test_requests_that_vllm_would_refuse_halfway(prompts: list[list[int]], word: str) -> None:
    with pytest.raises(DataError, match=word):
        engine.check_request(prompts, Sampling(max_new_tokens=10), max_model_len=64, vocab_size=16)


def test_impossible_sampling() -> None:
    with pytest.raises(ConfigError):
        engine.check_request(
            [[1]], Sampling(top_p=0.0, max_new_tokens=4), max_model_len=64, vocab_size=16
        )


def test_request_seeds_differ_and_repeat() -> None:
    seeds = [request_seed(Sampling(seed=3), i) for i in range(100)]
    assert len(set(seeds)) == 100
    assert seeds == [request_seed(Sampling(seed=3), i) for i in range(100)]
    assert request_seed(Sampling(), 0) is None


def test_errors_cross_the_transport_as_data() -> None:
    class Worker:
        @reports_errors
        def fails(self) -> dict[str, Any]:
            raise CheckpointError("Broken.", given=3, expected="4", do="Correct it.")

    answer = json.loads(json.dumps(Worker().fails()))
    with pytest.raises(CheckpointError, match="Broken") as caught:
        first_of([answer])
    assert (caught.value.given, caught.value.do) == ("3", "Correct it.")
    with pytest.raises(EngineError):
        raise_reported(
            {
                "error": {
                    "kind": "__import__",
                    "problem": "x",
                    "given": None,
                    "expected": None,
                    "do": "",
                }
            }
        )


def test_server_arguments(model: Path) -> None:
    arguments = server_arguments(
        plan_launch(model, None, EngineConfig(enforce_eager=False), 1), 1234
    )
    assert "--no-enforce-eager" in arguments
    assert arguments[arguments.index("--logprobs-mode") + 1] == "processed_logprobs"


def test_one_openmp_is_loaded_first_whatever_vllm_left_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(launch.sys, "prefix", str(tmp_path))
    ours = tmp_path / "lib" / "libiomp5.so"
    preloaded = (
        "/omp/libtcmalloc.so:/torch/lib/libgomp.so.1"
        " /torch.libs/libgomp-a34b3233.so.1.0.0:/usr/lib/libomp.so:/b/libiomp5.so"
    )
    monkeypatch.setenv("LD_PRELOAD", preloaded)
    assert "LD_PRELOAD" not in process_environment(EngineConfig(), has_gpu=False)
    ours.touch()
    assert (
        process_environment(EngineConfig(), has_gpu=False)["LD_PRELOAD"]
        == f"/omp/libtcmalloc.so:{ours}"
    )
    assert "LD_PRELOAD" not in process_environment(EngineConfig(), has_gpu=True)
    monkeypatch.delenv("LD_PRELOAD")
    assert process_environment(EngineConfig(), has_gpu=False)["LD_PRELOAD"] == str(ours)


def test_engines_of_other_settings_share_compiled_kernels_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environment() -> dict[str, str]:
        return process_environment(EngineConfig(), has_gpu=False)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("medusa_ppo.engines.launch.is_cpu_build", lambda: True)
    assert environment()["VLLM_USE_AOT_COMPILE"] == "0"
    # Torch's own folder is in /tmp, where others may have put something; it runs what is there.
    assert environment()["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "medusa-ppo" / "kernels")
    # Torch writes that into the environment when it is imported.
    torchs = Path(tempfile.gettempdir()) / "torchinductor_somebody"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(torchs))
    assert environment()["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "medusa-ppo" / "kernels")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kernels")
    assert environment()["TORCHINDUCTOR_CACHE_DIR"] == "/kernels"
    monkeypatch.setattr("medusa_ppo.engines.launch.is_cpu_build", lambda: False)
    assert "VLLM_USE_AOT_COMPILE" not in process_environment(EngineConfig(), has_gpu=True)


def test_counters_page_is_summed_over_engines() -> None:
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    page = "\n".join(
        [
            "# HELP vllm:spec_decode_num_drafts_total x",
            'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0',
            'vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0',
            'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0',
            'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 7.0',
            by_position + '{engine="0",model_name="m",position="0"} 5.0',
            by_position + '{engine="0",model_name="m",position="1"} 2.0',
            'vllm:spec_decode_num_accepted_tokens_created{engine="0"} 1.7e9',
        ]
    )
    assert parse_counters(page) == Counters(15, 30, 7, (5, 2))
    assert issubclass(EngineError, MedusaError)


# ---- a started server must not outlive a run that is killed

CHILD = (
    "from medusa_ppo.engines.launch import end_with_parent; end_with_parent()\nprint('ready',"
    " flush=True); import time; time.sleep(60)"
)
PARENT = (
    "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
    " stdout=subprocess.PIPE, start_new_session=True)\nchild.stdout.readline()\nprint(child.pid,"
    " flush=True)\nchild.wait()\n"
)


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return (
        not status.exists()
        or status.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_the_server_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        assert not gone(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 10
        while not gone(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert gone(pid)
    finally:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
        parent.stdout.close()


def started_server(parent: int | None, asked: str = "") -> subprocess.CompletedProcess[str]:
    """What a server does whose environment names this process as its parent; None: it names none.

    Args:
        asked: what it believes to be its parent's id; empty: it asks the system.
    """
    environment = {name: value for name, value in os.environ.items() if name != launch.PARENT}
    if parent is not None:
        environment[launch.PARENT] = str(parent)
    code = (
        f"import os\n{asked and f'os.getppid = lambda: {asked}'}\n"
        "from medusa_ppo.engines.launch import PARENT, end_with_parent\n"
        "end_with_parent()\nprint('ready', os.environ.get(PARENT))"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_a_server_starts_only_below_the_process_that_started_it() -> None:
    for parent in (os.getpid(), None):
        found = started_server(parent)
        assert (found.returncode, found.stdout) == (0, "ready None\n"), found.stderr
    orphan = started_server(os.getpid() + 1)
    assert orphan.returncode == 1 and not orphan.stdout
    assert "the run that started it is gone" in orphan.stderr
    assert f"given:    process {os.getpid()} " in orphan.stderr
    assert f"expected: process {os.getpid() + 1} " in orphan.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_a_server_starts_where_the_run_is_process_1() -> None:
    """As in a container whose command is the run. Tests are never process 1: the server is told so
    in the system's place.
    """
    found = started_server(1, asked="1")
    assert (found.returncode, found.stdout) == (0, "ready None\n"), found.stderr

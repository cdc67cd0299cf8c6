"""What the contract tests share: a small actor with heads, and stand-ins for packages that no
machine without CUDA can have.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("openrlhf") is not None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import openrlhf_on_cpu

    openrlhf_on_cpu.without_flash_attn()


HERE = Path(__file__).resolve().parent


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """train(command, environment, timeout_s, *folders): a loop's own command in the test's folder,
    and what it wrote. Its whole session is ended with the test, since Ray starts many processes,
    and such folders are removed.
    """
    started: list[subprocess.Popen[bytes]] = []
    left: list[Path] = []

    def run(
        command: list[str], environment: Mapping[str, str], timeout_s: float, *folders: Path
    ) -> str:
        left.extend(folders)
        known = {
            name: value
            for name, value in os.environ.items()
            if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
        }
        ours = {
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        env = {**known, **ours, **environment}
        with open(tmp_path / "log", "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=tmp_path,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            started.append(process)
            code = process.wait(timeout=timeout_s)
        said = (tmp_path / "log").read_text(errors="replace")
        assert code == 0, said[-6000:]
        return said

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def small_actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer, as a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from medusa_ppo.demo.task import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    end = tokenizer.eos_token_id
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            **sizes,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=end,
        )
    )
    folder = tmp_path_factory.mktemp("actor")
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def local_ray() -> Iterator[None]:
    from medusa_ppo.runtime.processes import local_ray as start

    with start(cpus=2):
        yield


ROWS = [((5, 6), (1, 2)), ((7,), (3, 3, 4)), ((5, 6), (9,))]
"""Prompts and responses of a small scoring pass."""


@pytest.fixture(scope="session")
def scored(small_actor: Path) -> tuple[torch.nn.Module, list[Any], torch.Tensor, torch.Tensor]:
    """The actor, ROWS, and what any right tap must find: states and log-probs of their response
    tokens, from one unpadded row each.
    """
    from medusa_ppo.actors.hf import load_actor

    model = load_actor(small_actor)
    states = []
    logprobs = []
    with torch.no_grad():
        for prompt, answer in ROWS:
            hidden = model.model(input_ids=torch.tensor([[*prompt, *answer]])).last_hidden_state[
                0, len(prompt) - 1 : -1
            ]
            states.append(hidden)
            logprobs.append(model.lm_head(hidden).log_softmax(-1)[range(len(answer)), list(answer)])
    return model, ROWS, torch.cat(states), torch.cat(logprobs)

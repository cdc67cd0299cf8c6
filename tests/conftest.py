"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
CHAIN_WIDTH = 64

# Must stand before anything imports vLLM or Ray: engines in this process, no token file, no calls
# home.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# As in a Ray that we start: with Ray's 15 a companion got no core beside another test's processes,
# and did not start within three minutes.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch asks a name server who 127.0.0.1 is whenever somebody joins a TCPStore; one that answers so
# many a second holds it for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Models here are tiny: threads that wait for each other took three times the processor time, and
# many times that beside another program.
os.environ.setdefault("OMP_NUM_THREADS", "1")


GPU = pytest.param("cuda", marks=pytest.mark.gpu)
GPUS = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.gpus(2)])
"""A GPU, and a GPU for a test that needs two."""

cpu_alone = pytest.mark.parametrize("device", ["cpu"], indirect=True)
"""For a test of something that only a CPU has."""


COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All collected tests, including those that the marker expression deselects."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = list(items)


def pytest_runtestloop(session: pytest.Session) -> None:
    """Without a GPU, one error instead of a failure for each GPU test."""
    config = session.config
    if config.option.collectonly:
        return
    asked = sum(item.get_closest_marker("gpu") is not None for item in session.items)
    if asked and not gpus_here():
        raise pytest.UsageError(
            f"There is no GPU. given: {asked} tests that need one  expected: a CUDA device that"
            " torch sees  do this: run them on a machine where `medusa-ppo doctor` names a GPU"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are."""
    marker = item.get_closest_marker("gpus")
    if marker is not None and gpus_here() < marker.args[0]:
        pytest.skip(f"needs {marker.args[0]} GPUs, and there are {gpus_here()}")


def gpus_here() -> int:
    """CUDA devices that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="module", params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a test computes. Tests that take it run on the CPU, and on a GPU in `make test-gpu`."""
    import torch

    return torch.device(request.param)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with the real text and the small real actor that stands beside the checkout."""
    folder = ROOT.parent / "shared"
    if not (folder / "actors" / "gsm8k-4m").is_dir():
        pytest.skip("needs the shared actors and data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def chain_actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An actor whose next token mostly follows from the last one by a fixed permutation: heads have
    something to learn at once.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from medusa_ppo.demo.task import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": CHAIN_WIDTH,
        "intermediate_size": 2 * CHAIN_WIDTH,
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
            tie_word_embeddings=False,
        )
    )
    embedding = torch.nn.functional.normalize(torch.randn(len(tokenizer), CHAIN_WIDTH), dim=1)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(1.5 * embedding[torch.randperm(len(tokenizer))])
    folder = tmp_path_factory.mktemp("actor")
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


IMAGE_WORDS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type =="
    " 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{%"
    " endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{%"
    " endif %}"
)


@pytest.fixture(scope="session")
def vision_actor(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """vision_actor(family="qwen2_5_vl", groups=1) -> folder of a tiny vision-language actor with
    its processor; its next token mostly follows from the last one, as `chain_actor`'s. An image
    token is a word that it may write. `groups`: of queries, with a key and a value each.
    """
    made: dict[tuple[str, int], Path] = {}

    def folder(family: str = "qwen2_5_vl", groups: int = 1) -> Path:
        key = (family, groups)
        if key not in made:
            made[key] = _save_vision_actor(tmp_path_factory.mktemp(family), family, groups)
        return made[key]

    return folder


def _save_vision_actor(folder: Path, family: str, groups: int) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    letters = Tokenizer(
        models.BPE(
            vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        eos_token=IMAGE_WORDS[0],
        additional_special_tokens=IMAGE_WORDS[1:],
    )
    tokenizer.chat_template = CHAT
    end, _, start, stop, image, video = tokenizer.convert_tokens_to_ids(IMAGE_WORDS)
    patch = 16 if family == "qwen3_vl" else 14
    text = {
        "vocab_size": len(tokenizer) + -len(tokenizer) % 8,
        "hidden_size": CHAIN_WIDTH,
        "intermediate_size": 2 * CHAIN_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": groups,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_vl":
        text["head_dim"] = CHAIN_WIDTH // 2
    vision = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    vision |= {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": CHAIN_WIDTH, "mlp_ratio": 2},
        "qwen2_5_vl": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": CHAIN_WIDTH,
            "window_size": 4 * patch,
            "fullatt_block_indexes": [1],
        },
        "qwen3_vl": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": CHAIN_WIDTH,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    }[family]
    ids = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": stop,
    }
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=False, **ids
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float()
    embedding = torch.nn.functional.normalize(torch.randn(text["vocab_size"], CHAIN_WIDTH), dim=1)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embedding)
        model.lm_head.weight.copy_(1.5 * embedding[torch.randperm(len(embedding))])
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    side = 2 * patch
    Qwen2VLImageProcessorPil(
        min_pixels=side * side, max_pixels=9 * side * side, patch_size=patch
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def picture() -> Callable[..., bytes]:
    """picture(seed=0, width=60, height=60) -> a PNG of colours that the seed decides."""

    def paint(seed: int = 0, width: int = 60, height: int = 60) -> bytes:
        import io

        import numpy as np
        from PIL import Image

        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file := io.BytesIO(), format="PNG")
        return file.getvalue()

    return paint


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., str]:
    """run_ranks(script, ranks, *arguments): `python SCRIPT RANK RANKS ARGUMENTS...` for each rank;
    all are ended, whatever happens.
    """
    return _run_ranks


def _run_ranks(script: Path, ranks: int, *arguments: str, timeout_s: float = 120.0) -> str:
    env = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(ranks), *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        # One rank that fails leaves the others waiting for it: the first failure ends all.
        while (
            any(p.poll() is None for p in processes)
            and not any(p.poll() for p in processes)
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
    finally:
        codes = [p.poll() for p in processes]
        for process in processes:
            process.kill()
        words = "\n".join(
            f"rank {i} ({code}):\n{p.communicate()[0]}"
            for i, (p, code) in enumerate(zip(processes, codes, strict=True))
        )
    assert not any(code is None or code for code in codes), words
    return words

"""Makes old_run.tar.gz, the run folder of an earlier release that test_old_run.py opens. Run it
with that release's code:

git worktree add --detach OLD 7856bb5f     # The end of 0.2.0.
pip install --no-deps --target OLD/installed OLD      # vLLM finds a plugin by what is installed
PYTHONPATH=OLD/installed python tests/medusa_ppo/ppo/make_old_run.py NEW_FOLDER
tests/medusa_ppo/ppo/old_run.tar.gz

The copies of actor and heads at the end of the run are left out, and paths of the machine are
replaced by ACTOR and OUT.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
import yaml

LEFT_OUT = ("actor", "heads-final", "report.html")


def tiny_actor(folder: Path, tokenizer: Any) -> Path:
    """An actor with so few weights that its checkpoint can lie in a repository."""
    from transformers import LlamaConfig, LlamaForCausalLM

    end = tokenizer.eos_token_id
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "initializer_range": 1.0,
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **sizes,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(folder: Path, target: Path) -> None:
    from medusa_ppo.demo.task import build_tokenizer

    actor = tiny_actor(folder / "actor", build_tokenizer())
    settings = {
        "name": "run",
        "out": str(folder),
        "model": {"path": str(actor)},
        "data": {"path": "demo", "max_prompt_tokens": 100, "split": "train[:32]"},
        "sampling": {"max_new_tokens": 16, "responses_per_prompt": 2},
        "engine": {"max_num_seqs": 8, "max_model_len": 128, "threads": 1},
        "heads": {"num_heads": 2, "kind": "medusa"},
        "companion": {"wait": True, "replay_versions": 1, "learning_rate": 1e-2},
        "ppo": {
            "steps": 4,
            "prompts_per_step": 8,
            "actor_learning_rate": 1e-4,
            "checkpoint_every": 1,
            "threads": 1,
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    command = [
        sys.executable,
        "-c",
        "from medusa_ppo.cli import main; main()",
        "ppo",
        "--config",
        str(folder / "run.yaml"),
    ]
    subprocess.run(command, check=True, env=os.environ)
    for path in (folder / "run").rglob("*"):
        if path.suffix in (".json", ".yaml", ".jsonl", ".md", ".csv"):
            text = path.read_text(encoding="utf-8")
            path.write_text(
                text.replace(str(actor), "ACTOR").replace(str(folder), "OUT"), encoding="utf-8"
            )
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted((folder / "run").iterdir()):
            if path.name not in LEFT_OUT:
                archive.add(path, path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))

"""How long do requests wait when an engine loads newer heads from its feed between two steps?

    python benchmarks/fed_step.py [--ranks 1] [--width 2048] [--heads 12] [--drafts 2]
                                  [--versions 20]

One engine in this process, over an untrained actor of that width, with heads of kind `medusa`
(2048 x 12: 50M parameters, float32). Its requests run all the time, and as soon as a version has
been loaded, another one is published. Timed is what a step adds by the feed: all that the engine
does between two steps (`EngineCore.post_step`), in steps that load and in those that do not; next
to it the steps themselves, while a version is on its way and while none is. `--ranks 2` is tensor
parallelism, each rank on a core of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# The engine is driven and timed step by step, so it has to be in this process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
WORDS = 1024
SEQUENCES = 8
TOKENS = 160
QUIET_STEPS = 60


def make(folder: Path, width: int, count: int) -> Any:
    """`actor` and `heads` in the folder, untrained, and two files of other weights for the heads.
    Returns the heads, and how a feed names their actor.
    """
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from heads.checkpoint import save_heads, save_state
    from heads.heads_config import HeadsConfig
    from heads.modules import MedusaHeads
    from medusa_ppo.feeds.feed_manifest import FeedActor

    torch.manual_seed(0)
    actor = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=1,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
        )
    )
    actor.float().save_pretrained(folder / "actor")
    words = Tokenizer(models.WordLevel({str(n): n for n in range(WORDS)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(folder / "actor")
    heads = MedusaHeads(HeadsConfig(width, WORDS, count)).requires_grad_(False)
    save_heads(folder / "heads", heads, lm_head_VD=actor.lm_head.weight)
    for number in range(2):
        for parameter in heads.parameters():
            # Other weights in each: an engine skips what it already has.
            parameter.add_(0.01 * torch.randn_like(parameter))
        save_state(folder / f"state-{number}", heads.trainable_state())
    return heads, FeedActor.of(heads.config, actor.lm_head.weight)


class Timed:
    """The engine's steps, and what it does between them.

    Attributes:
        between: seconds between steps that loaded nothing.
        loads: seconds between steps that loaded a version.
        quiet, busy: seconds of steps while no version was on its way, and while one was.
    """

    def __init__(
        self, core: Any, feed: Any, release: Any, files: list[Path], versions: int
    ) -> None:
        from medusa_ppo.vllm_plugin.self_feeding import FEEDER

        self.between: list[float] = []
        self.loads: list[float] = []
        self.quiet: list[float] = []
        self.busy: list[float] = []
        self._core = core
        self._named = FEEDER
        self._feed, self._release, self._files = feed, release, files
        self._versions = versions
        self._published = self._steps = 0
        self._publishing: threading.Thread | None = None
        self._step, self._post_step = core.step_fn, core.post_step
        core.step_fn, core.post_step = self._timed_step, self._timed_post_step

    @property
    def _known(self) -> int:
        feeder = getattr(self._core, self._named, None)
        return feeder._watch.known if feeder is not None else 0

    @property
    def over(self) -> bool:
        return self._known >= self._versions

    def _timed_step(self) -> Any:
        coming = self._known < self._published
        if not coming and self._steps >= QUIET_STEPS and self._published < self._versions:
            self._publish()
            coming = True
        began = time.perf_counter()
        answer = self._step()
        (self.busy if coming else self.quiet).append(time.perf_counter() - began)
        self._steps += 1
        return answer

    def _publish(self) -> None:
        """In a thread, as from another process; the next one after some steps without any."""
        self._published += 1
        self._steps = QUIET_STEPS - 10
        release = self._release(self._published)
        self._publishing = threading.Thread(
            target=self._feed.publish, args=(self._files[self._published % 2], release)
        )
        self._publishing.start()

    def _timed_post_step(self, *args: Any, **kwargs: Any) -> None:
        known = self._known
        began = time.perf_counter()
        self._post_step(*args, **kwargs)
        seconds = time.perf_counter() - began
        (self.loads if self._known > known else self.between).append(seconds)


def work(options: argparse.Namespace, folder: Path) -> Timed:
    heads, of = make(folder, options.width, options.heads)
    from medusa_ppo.config.engine_section import EngineConfig
    from medusa_ppo.contract.rollouts import Sampling
    from medusa_ppo.engines.colocated import ColocatedEngine
    from medusa_ppo.feeds.feed_manifest import Release
    from medusa_ppo.feeds.folder_feed import FolderFeed
    from medusa_ppo.vllm_plugin import feed_watch
    from medusa_ppo.vllm_plugin.speculation import FEED

    os.environ[FEED] = str(folder / "feed")
    feed_watch.LOOK_S = 0.2
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=SEQUENCES,
        max_model_len=512,
        threads=1,
        memory_fraction=0.05,
        enforce_eager=True,
        num_drafts=options.heads,
        extra={"tensor_parallel_size": options.ranks} if options.ranks > 1 else {},
    )
    if options.ranks > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(options.ranks)))

    def release(version: int) -> Release:
        return Release(actor=of, dtype="float32", version=version, policy_version=0)

    sys.stdout.write(f"{sum(p.numel() for p in heads.parameters()):,} parameters of heads\n")
    with ColocatedEngine(folder / "actor", folder / "heads", config) as engine:
        engine.configure(num_drafts=options.drafts)
        core = engine._running().llm_engine.engine_core.engine_core
        files = [folder / "state-0", folder / "state-1"]
        timed = Timed(core, FolderFeed(folder / "feed"), release, files, options.versions)
        prompts = [[10 + row, 20, 30] for row in range(SEQUENCES)]
        while not timed.over:
            engine.generate(prompts, Sampling(0.0, max_new_tokens=TOKENS, ignore_eos=True))
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1, help="of tensor parallelism")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=12)
    # Drafts of no use cost steps that say nothing about loading. But a load packs, and tries, the
    # weights of as many drafts as a step has.
    parser.add_argument("--drafts", type=int, default=2, help="of a step")
    parser.add_argument("--versions", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(
        # Where the product's own files are; otherwise a disk would be timed.
        prefix="medusa-ppo-bench-",
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None,
    ) as name:
        timed = work(options, Path(name))
    rows = {
        "between two steps, nothing loaded": timed.between,
        "between two steps, a version loaded": timed.loads,
        "a step, no version on its way": timed.quiet,
        "a step, a version on its way": timed.busy,
    }
    sys.stdout.write("| | count | median ms | 9 of 10 below | most |\n|---|---|---|---|---|\n")
    for text, seconds in rows.items():
        low = sorted(1e3 * value for value in seconds)
        figures = statistics.median(low), low[int(0.9 * (len(low) - 1))], low[-1]
        cells = " | ".join(f"{value:.1f}" for value in figures)
        sys.stdout.write(f"| {text} | {len(low)} | {cells} |\n")


if __name__ == "__main__":
    main()

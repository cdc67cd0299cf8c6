"""Compares settings of the companion: rollout batches of a real PPO run are recorded once, and
learned from again with each setting.

    python benchmarks/companion_defaults.py record --out runs/defaults --config configs/gsm8k.yaml
        --steps 24 [model.path=DIR key=value ...]
    python benchmarks/companion_defaults.py replay --out runs/defaults
        [--only base ...] [--seeds 0 1] [--heads HEADS]

`record` runs PPO with transformers instead of the engine (the same loop, learner, plugin and tap;
no vLLM, no companion) and stores what the companion would have received: hidden states, tokens,
log-probs and the actor's tables of every step. `--reward numbers` pays for digits: a small actor on
real text learns that within a few steps, so the policy really changes; `--reward config` uses the
configuration's reward.

`replay` feeds these batches to `medusa_ppo.companion.cycle.Cycle`, one setting after the other. The
base has the companion's defaults; the name of each other setting says how it differs. Before a
batch is learned from, the heads serving at that moment are replayed on all of it: they have never
seen it, and this is what the engine would have counted. The figure is the mean over the last half
of the batches. Settings get the same batches, so differences are taken batch by batch. Finished
settings are stored in OUT/results.jsonl and not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from transformers import PreTrainedModel

from heads.checkpoint import load_state, save_state
from heads.errors import UsageError
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor, load_tokenizer
from medusa_ppo.companion.collector import BatchCollector
from medusa_ppo.companion.cycle import Cycle
from medusa_ppo.companion.gate import AVERAGE, Served, replay
from medusa_ppo.companion.positions import EarlySample
from medusa_ppo.companion.wire import TableRows
from medusa_ppo.config.companion_section import CompanionConfig
from medusa_ppo.config.run_config import RunConfig, build_config, load_config
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Counters, Response, Rollouts, Sampling
from medusa_ppo.contract.status import CompanionStatus, SwapReceipt
from medusa_ppo.demo.actor_cache import ensure_demo_actor
from medusa_ppo.engines.actor_sync import ActorSync
from medusa_ppo.engines.rollout_engine import NoEngine
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin, heads_for_table, initial_heads
from medusa_ppo.ppo.critic import Critic
from medusa_ppo.ppo.generation import PromptStream
from medusa_ppo.ppo.learner import Learner as PPOLearner
from medusa_ppo.ppo.loop import PPOLoop
from medusa_ppo.ppo.rewards import CallableReward, make_reward
from medusa_ppo.ppo.session import Parts
from medusa_ppo.runtime.files import write_atomic
from medusa_ppo.runtime.hardware import settled

TENSORS = ("hidden_MD", "response_ids_M", "logprobs_M", "lengths_S", "prompts_S")
SHORT = 100
KEPT_METRICS = (names.REWARD_MEAN, names.KL_REFERENCE, names.ENTROPY, names.RESPONSE_LENGTH)
BASE: dict[str, Any] = {
    name: getattr(CompanionConfig(), name)
    for name in ("epochs", "replay_versions", "learning_rate", "gate_confidence", "loss")
}
NO_KEYS: dict[str, Any] = {"average": AVERAGE, "rate": 1.0}
"""No keys of a run: the running mean's decay, and a factor on the step size."""
GRID: dict[str, dict[str, Any]] = {
    "base": {},
    "loss ce_tv": {"loss": "ce_tv"},
    "no running mean": {"average": 0.0},
    "running mean of 0.99": {"average": 0.99},
    "1 pass": {"epochs": 1},
    "4 passes": {"epochs": 4},
    "replay 1 version": {"replay_versions": 1},
    "replay 2 versions": {"replay_versions": 2},
    "replay 4 versions": {"replay_versions": 4},
    "half the learning rate": {"rate": 0.5},
    "twice the learning rate": {"rate": 2.0},
    "gate 0.6": {"gate_confidence": 0.6},
    "gate 0.75": {"gate_confidence": 0.75},
    "gate 0.9": {"gate_confidence": 0.9},
}


def numbers(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Ten times the share of digits among a response's characters; a short one counts as if it had
    SHORT characters, or a single digit would be best.
    """
    return 10.0 * sum(c.isdigit() for c in response) / max(SHORT, len(response))


class Sampler(NoEngine):
    """The actor itself, sampled token by token with transformers, so its responses are on-policy
    without a sync.
    """

    def __init__(self, actor: PreTrainedModel) -> None:
        super().__init__()
        self._actor = actor
        self._end = actor.config.eos_token_id

    def sync_actor(self, path: str | Path, version: int, checked: Any = None) -> SwapReceipt:
        self.policy_version = version
        return SwapReceipt(version, "", 0.0)

    @torch.no_grad()
    def generate(self, prompts: Any, sampling: Sampling) -> Rollouts:
        started = time.monotonic()
        generator = torch.Generator().manual_seed(sampling.seed or 0)
        rows = [
            index for index in range(len(prompts)) for _ in range(sampling.responses_per_prompt)
        ]
        width = max(map(len, prompts))
        # Padded on the left, so that all responses begin in the same column.
        ids_BT = torch.tensor(
            [[self._end] * (width - len(prompts[i])) + list(prompts[i]) for i in rows]
        )
        mask_BT = torch.tensor(
            [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in rows]
        )
        next_BT = ids_BT
        cache = None
        tokens = []
        logprobs = []
        ended_B = torch.zeros(len(rows), dtype=torch.bool)
        # Rows that have ended continue, and are cut in `_response`: one shape for all.
        for _ in range(sampling.max_new_tokens):
            # Positions count tokens, not columns: padding must not move them.
            positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -next_BT.shape[1] :]
            out = self._actor(
                next_BT,
                attention_mask=mask_BT,
                position_ids=positions_BT,
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            logp_BV = (out.logits[:, -1].float() / sampling.temperature).log_softmax(-1)
            next_BT = torch.multinomial(logp_BV.exp(), 1, generator=generator)
            tokens.append(next_BT)
            logprobs.append(logp_BV.gather(1, next_BT))
            mask_BT = torch.cat([mask_BT, torch.ones_like(next_BT)], dim=1)
            ended_B |= next_BT[:, 0] == self._end
            if bool(ended_B.all()):
                break
        responses = tuple(
            self._response(i, ids, logps)
            for i, ids, logps in zip(
                rows, torch.cat(tokens, 1), torch.cat(logprobs, 1), strict=True
            )
        )
        seconds = time.monotonic() - started
        return Rollouts(
            tuple(map(tuple, prompts)),
            responses,
            Counters(),
            seconds,
            sampling,
            self.policy_version,
        )

    def _response(self, prompt: int, ids_T: torch.Tensor, logprobs_T: torch.Tensor) -> Response:
        ends = (ids_T == self._end).nonzero()
        length = int(ends[0]) + 1 if ends.numel() else ids_T.numel()
        return Response(
            prompt,
            tuple(ids_T[:length].tolist()),
            tuple(logprobs_T[:length].tolist()),
            "stop" if ends.numel() else "length",
        )


class ClientRecorder:
    """Replaces the companion's client, and writes what it receives to files."""

    def __init__(self, folder: Path, tables: dict[str, torch.Tensor]) -> None:
        self._folder = folder
        self._tables = tables
        self.count = 0

    def give_way(self, wanted: bool) -> None:
        """Nothing is trained here."""

    def collector(self, rollouts: Rollouts, sample: EarlySample | None = None) -> BatchCollector:
        return BatchCollector(rollouts)

    def count_left_out(self, tokens: int) -> None:
        """Nobody reads it here."""

    def submit(self, batch: RolloutBatch, rows: TableRows | None = None) -> None:
        # float64 can hold a version and a temperature, so one tensor suffices.
        meta = torch.tensor([batch.policy_version, batch.temperature], dtype=torch.float64)
        tensors = {name: getattr(batch, name) for name in TENSORS}
        save_state(
            self._folder / f"batch-{self.count:04d}.safetensors",
            {**tensors, **self._tables, "meta": meta},
        )
        self.count += 1

    def update_lm_head(
        self,
        lm_head_VD: torch.Tensor,
        policy_version: int,
        *,
        embedding_VD: torch.Tensor | None = None,
    ) -> None:
        self._tables = _tables(lm_head_VD, embedding_VD)

    def newest(self, after_version: int, timeout_s: float = 0.5) -> None:
        """Nothing is trained here."""

    def status(self) -> CompanionStatus:
        return CompanionStatus(batches_received=self.count)

    def close(self) -> None:
        """Nothing to end."""


def record(args: argparse.Namespace) -> None:
    """Run PPO and write OUT/batch-*.safetensors and OUT/recorded.json; the files of an interrupted
    run can be used.
    """
    config = settled(load_config(args.config, [*args.overrides, f"ppo.steps={args.steps}"]))
    if (config.sampling.top_p, config.sampling.top_k) != (1.0, None):
        raise UsageError(
            "The sampler here knows no top_p and top_k.",
            given=config.sampling,
            expected="both off",
            do="Remove them.",
        )
    if args.out.exists():
        raise UsageError(
            "A recording is made once.",
            given=args.out,
            expected="a folder that isn't there yet",
            do="Name another one.",
        )
    args.out.mkdir(parents=True)
    torch.set_num_threads(config.ppo.threads)
    path = str(ensure_demo_actor()) if config.model.path == "demo" else config.model.path
    actor = load_actor(path, "float32")
    tokenizer = load_tokenizer(path)
    heads = initial_heads(config, actor)
    tables = _tables(
        lm_head_weight(actor), embedding_weight(actor) if heads.config.needs_embedding else None
    )
    engine = Sampler(actor)
    recorder = ClientRecorder(args.out, tables)
    reward = (
        CallableReward(numbers, "numbers", 1.0)
        if args.reward == "numbers"
        else make_reward(config.ppo)
    )
    lines = []
    with tempfile.TemporaryDirectory() as folder, ActorSync(engine, "float32") as sync:
        learner = PPOLearner(actor, Critic(actor), config.ppo, seed=config.seed)
        # The recorder has the client's methods.
        plugin = MedusaPlugin(engine, recorder, heads=heads)
        prompts = PromptStream.load(config.data, tokenizer, seed=config.seed)
        loop = PPOLoop(
            config.model_copy(update={"out": folder}),
            Parts(prompts, tokenizer, learner, reward, engine, sync, plugin),
        )
        for step in range(config.ppo.steps):
            values = loop.step(step)
            # `PPOLoop.run` would advance it; here steps are taken one by one, to keep each one's
            # metrics.
            loop.position = type(loop.position)(step + 1, loop.position.policy_version + 1, 0.0)
            lines.append({name: values.get(name) for name in KEPT_METRICS})
            summary = {
                "config": config.model_dump(mode="json"),
                "reward": args.reward,
                "steps": lines,
            }
            write_atomic(args.out / "recorded.json", json.dumps(summary))
            _say(
                f"step {step}: "
                + ", ".join(f"{name} {value:.3f}" for name, value in lines[-1].items())
            )


def batches(folder: Path) -> Iterator[tuple[RolloutBatch, torch.Tensor, torch.Tensor | None]]:
    """Each recorded batch with the actor's tables at that time: lm_head, and the embedding if heads
    read it.
    """
    for path in sorted(folder.glob("batch-*.safetensors")):
        state = load_state(path)
        version, temperature = state["meta"].tolist()
        parts = {name: state[name] for name in TENSORS}
        yield (
            RolloutBatch(**parts, policy_version=int(version), temperature=temperature),
            state["lm_head"],
            state.get("embedding"),
        )


def learn_again(
    folder: Path, config: RunConfig, settings: dict[str, Any], seed: int, heads: str = ""
) -> dict[str, Any]:
    """Run one setting over all batches: tokens per step that the serving and frozen heads would
    have given on each batch, before it was learned from.

    `heads`: a native directory to start with, which is then the frozen control; empty: start with
    new heads.
    """
    settings = {**BASE, **NO_KEYS, **settings}
    average, rate = (settings.pop(name) for name in NO_KEYS)
    temperature = config.engine.draft_temperature
    companion = config.companion.model_copy(update=settings)
    cycle = None
    serving = []
    frozen = []
    rows = 0
    passes = []
    rates = []
    cpu_s = 0.0
    for batch, lm_head_VD, embedding_VD in batches(folder):
        if cycle is None:
            section = config.heads.model_copy(update={"path": heads})
            first = heads_for_table(config.model_copy(update={"heads": section}), lm_head_VD)
            start: dict[str, Any] = {
                "initial_state": first.trainable_state(),
                "embedding_VD": embedding_VD,
            }
            cycle = Cycle(
                first.config,
                companion,
                lm_head_VD,
                seed=seed,
                draft_temperature=temperature,
                **start,
            )
            if cycle.trainer._mean is not None:
                cycle.trainer._mean._decay = average
            cycle.trainer._learning_rate *= rate
        cycle.trainer.set_tables(lm_head_VD, embedding_VD)
        # Until the first publish there is no frozen copy; the serving heads are what it will be a
        # copy of.
        control = first if heads else cycle.frozen or cycle.serving
        for lengths, judged in ((serving, cycle.serving), (frozen, control)):
            result = replay(
                judged, batch, lm_head_VD, embedding_VD=embedding_VD, served=Served(temperature)
            )
            lengths.append(result.mean_acceptance_length)
        # Processor time: settings may run beside other programs.
        began = time.process_time()
        rows += cycle.run(batch).train.rows
        cpu_s += time.process_time() - began
        passes.append(cycle.passes)
        rates.append(cycle.trainer.rate)
    if cycle is None:
        raise UsageError(
            "There is nothing to learn from.",
            given=folder,
            expected="batch-*.safetensors",
            do="Run `record` first.",
        )
    lists = {"serving": serving, "frozen": frozen, "passes": passes, "rates": rates}
    return {**lists, "rows": rows, "cpu_s": cpu_s, "versions": cycle.version}


def replay_all(args: argparse.Namespace) -> None:
    """Run every setting and seed that is not in OUT/results.jsonl yet, then print the table."""
    torch.set_num_threads(1)
    recorded = json.loads((args.out / "recorded.json").read_text(encoding="utf-8"))
    config = build_config(recorded["config"])
    results = args.out / ("results-heads.jsonl" if args.heads else "results.jsonl")
    wanted = [
        name
        for name in GRID
        if not args.only or name == "base" or any(word in name for word in args.only)
    ]
    done = _read(results)
    for seed in args.seeds:
        for name in wanted:
            if (name, seed) in done:
                continue
            line = {
                "name": name,
                "seed": seed,
                **learn_again(args.out, config, GRID[name], seed, args.heads),
            }
            # Write each line at once: a grid takes hours, and continues after an interruption.
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            _say(
                f"{name}, seed {seed}: {fmean(last_half(line['serving'])):.3f}, {line['cpu_s']:.0f}"
                " CPU s"
            )
    done = _read(results)
    sys.stdout.write(
        "\n".join(
            table(
                {
                    key: line
                    for key, line in done.items()
                    if key[0] in wanted and key[1] in args.seeds
                }
            )
        )
        + "\n"
    )


def table(done: dict[tuple[str, int], dict[str, Any]]) -> list[str]:
    """A Markdown table with a row for each setting; differences to the base are taken batch by
    batch, for the same seed.
    """
    lines = [
        (
            "| setting | tokens a step, serving | difference to the base | frozen | positions"
            " trained | CPU s | mean passes | versions |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(name for name, _ in done):
        found = {seed: line for (other, seed), line in done.items() if other == name}
        lengths = [value for line in found.values() for value in last_half(line["serving"])]
        pairs = [
            (last_half(line["serving"]), last_half(done["base", seed]["serving"]))
            for seed, line in found.items()
        ]
        # Batch by batch: some batches are easier than others, for every setting.
        gains = [
            here - there for ours, base in pairs for here, there in zip(ours, base, strict=True)
        ]
        error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        cells = [
            name,
            f"{fmean(lengths):.3f}",
            "" if name == "base" else f"{fmean(gains):+.3f} ± {error:.3f}",
            f"{fmean(value for line in found.values() for value in last_half(line['frozen'])):.3f}",
            f"{fmean(line['rows'] for line in found.values()):,.0f}",
            f"{fmean(line['cpu_s'] for line in found.values()):.0f}",
            f"{fmean(value for line in found.values() for value in line['passes']):.2f}",
            f"{fmean(line['versions'] for line in found.values()):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def last_half(values: list[float]) -> list[float]:
    return values[len(values) // 2 :]


def _read(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.is_file()
        else []
    )
    return {(line["name"], line["seed"]): line for line in lines}


def _tables(lm_head_VD: torch.Tensor, embedding_VD: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tables = {
        "lm_head": lm_head_VD,
        **({} if embedding_VD is None else {"embedding": embedding_VD}),
    }
    return {name: table.detach().to("cpu", copy=True) for name, table in tables.items()}


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run PPO once and keep its batches")
    recording.add_argument("--config", type=Path, required=True)
    recording.add_argument("--steps", type=int, default=24)
    recording.add_argument("--reward", choices=("config", "numbers"), default="config")
    recording.add_argument("overrides", nargs="*", help="key=value pairs over the configuration")
    replaying = commands.add_parser(
        "replay", help="learn from them with each setting and print the table"
    )
    replaying.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="settings whose names hold one of these words; the base is always there",
    )
    replaying.add_argument(
        "--heads", default="", help="native heads to begin with; they are the frozen control then"
    )
    replaying.add_argument("--seeds", type=int, nargs="+", default=[0])
    for command in (recording, replaying):
        command.add_argument(
            "--out", type=Path, required=True, help="folder of the recording (`record` makes it)"
        )
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    (record if args.command == "record" else replay_all)(args)


if __name__ == "__main__":
    main(sys.argv[1:])

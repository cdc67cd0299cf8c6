"""Ten checks of an unknown loop: `medusa-ppo check-loop my_module:make_trainer`.

`make_trainer(medusa)` returns an object with a method `train()`, which trains on at least four
rollout batches, and with the actor as `model`, a causal LM of transformers. `medusa` is a mapping
of settings, or None for the unchanged loop. For the tenth check every call must do the same: sample
greedily (top_k=1), from seeded data. The process that trains has the plugin.

Each training runs in a separate process. MedusaPlugin's methods are observed but unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from heads.errors import ConfigError
from medusa_ppo.actors.actor_tables import plain_model
from medusa_ppo.companion.client import CompanionClient
from medusa_ppo.contract.rollout_batch import RolloutBatch
from medusa_ppo.contract.rollouts import Rollouts
from medusa_ppo.plugin.medusa_plugin import MedusaPlugin

SETTINGS = {
    "heads": {"num_heads": 2},
    "engine": {"num_drafts": 2},
    "companion": {
        "wait": True,
        "learning_rate": 1e-2,
        "epochs": 8,
        "batch_positions": 256,
        "on_error": "raise",
    },
}
"""Default settings for the loop: small heads that learn quickly, and a companion that waits for
every batch.
"""
TIMEOUT_S = 1800.0
NEAR_NATS = 0.05
MOST = 0.9


@dataclass(frozen=True)
class LoopCheck:
    """One check: what was found, and what to do if it is not ok."""

    name: str
    ok: bool
    found: str
    do: str = ""


@dataclass
class Watch:
    """What a training did with the plugin, in order.

    Attributes:
        calls: names of the called hooks.
        batches: a row for each rollout batch.
        versions: the policy versions that the loop reported.
        fits: for each batch that went to the companion, how well its states predict its tokens.
        wrong_tables: how often the reported lm_head was not the model's own.
        swapped: the version installed last, its checksum and the engine's.
    """

    calls: list[str] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    fits: list[dict[str, float]] = field(default_factory=list)
    wrong_tables: int = 0
    swapped: list[Any] = field(default_factory=list)
    _table: torch.Tensor | None = None
    _model: Any = None

    def install(self) -> None:
        """Observe MedusaPlugin's methods in this process from now on."""
        plugin: Any = MedusaPlugin
        self._beside(plugin, "__init__", before=lambda *_, **__: self.calls.append("start"))
        self._beside(plugin, "before_generation", after=self._installed)
        self._beside(plugin, "rollout_ready", before=self._rollouts)
        self._beside(plugin, "tables_updated", after=self._updated)
        self._beside(plugin, "close", before=lambda *_: self.calls.append("close"))
        self._beside(CompanionClient, "submit", before=self._submitted)

    def _beside(
        self,
        kind: Any,
        name: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
    ) -> None:
        # The class's methods are replaced: the loop may create objects anywhere and at any time.
        whole = getattr(kind, name)

        @functools.wraps(whole)
        def method(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            answer = whole(*args, **kwargs)
            if after is not None:
                after(*args, **kwargs)
            return answer

        setattr(kind, name, method)

    def _installed(self, plugin: Any) -> None:
        self.calls.append("before_generation")
        installed = plugin.installer.installed
        if installed is not None and hasattr(plugin._engine, "checksums"):
            self.swapped = [
                installed.version,
                installed.checksum,
                plugin._engine.checksums()["heads"],
            ]

    def _rollouts(self, plugin: Any, rollouts: Rollouts) -> None:
        self.calls.append("rollout_ready")
        # Copied, because the loop updates the table in place, while the states that arrive later
        # belong to its present values.
        self._table = plugin._tables[0].detach().clone()
        counters = rollouts.counters
        responses = rollouts.responses
        known = sum(
            # A sampled token's log-prob may exceed 0 by rounding.
            len(r.logprobs) == len(r.token_ids) and all(p <= 1e-4 for p in r.logprobs)
            for r in responses
        )
        self.batches.append(
            {
                "responses": len(responses),
                "known": known,
                "tokens": rollouts.generated_tokens,
                "policy": rollouts.policy_version,
                "heads": rollouts.heads_version,
                "drafts": counters.drafts,
                "length": counters.mean_acceptance_length,
            }
        )

    def _submitted(self, client: Any, batch: RolloutBatch) -> None:
        rows = batch.state_rows_M
        here = rows >= 0
        assert self._table is not None, "rollout_ready comes first"
        logits_MV = batch.hidden_MD[rows[here]].float() @ self._table.float().cpu().T
        ids_M = batch.response_ids_M[here]
        known_M = batch.logprobs_M[here]
        # top_k=1 also samples greedily; vLLM then reports log-probs of 0.
        greedy = batch.temperature <= 0 or bool((known_M > -1e-4).all())
        if greedy:
            good = float((logits_MV.argmax(-1) == ids_M).float().mean())
        else:
            logprobs_MV = (logits_MV / batch.temperature).log_softmax(-1)
            off_M = known_M - logprobs_MV.gather(1, ids_M[:, None])[:, 0]
            # With top-k or top-p, behaviour log-probs are above those of the whole distribution.
            if batch.top_k > 0 or batch.top_p < 1:
                off_M = off_M.clamp(max=0)
            good = float((off_M.abs() < NEAR_NATS).float().mean())
        self.fits.append({"responses": batch.lengths_S.numel(), "good": good})

    def _updated(self, plugin: Any, tables: Any, version: int) -> None:
        self.calls.append("policy_updated")
        self.versions.append(version)
        if tables is not None and self._model is not None:
            self.wrong_tables += not torch.equal(
                tables[0].detach().cpu(),
                plain_model(self._model).get_output_embeddings().weight.cpu(),
            )


# ---- one training, in a process of its own


def run_arm(spec: str, medusa: Any, out: Path) -> None:
    """Train, and write what was observed and a digest of the weights to `out`."""
    watch = Watch()
    watch.install()
    sys.path.insert(0, os.getcwd())
    module, _, name = spec.partition(":")
    trainer = getattr(importlib.import_module(module), name)(medusa)
    watch._model = getattr(trainer, "model", None)
    trainer.train()
    digest = hashlib.sha256()
    # Hashed as bytes, because numpy has no bfloat16.
    for key, tensor in sorted(plain_model(trainer.model).state_dict().items()):
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(key.encode() + flat.view(torch.uint8).numpy().tobytes())
    seen = {
        name: getattr(watch, name)
        for name in ("calls", "batches", "versions", "fits", "wrong_tables", "swapped")
    }
    out.write_text(json.dumps(seen | {"weights": digest.hexdigest()}), encoding="utf-8")


def train_apart(spec: str, medusa: Any, folder: Path) -> dict[str, Any]:
    """`run_arm` in another process. Raises ConfigError with the end of its output if it fails."""
    out = folder / f"arm-{len(list(folder.iterdir()))}.json"
    command = [
        sys.executable,
        "-m",
        "medusa_ppo.loops.check_loop",
        spec,
        json.dumps(medusa),
        str(out),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        # Errors come last, because only the end of the output is shown.
        end = (done.stdout + done.stderr)[-1500:]
    except subprocess.TimeoutExpired:
        end = f"no end within {TIMEOUT_S:.0f} s"
    # This file is written last: if it exists, the training was completed, however the process ended
    # afterwards.
    if not out.is_file():
        raise ConfigError(
            "The loop fails to run.",
            given=f"{spec}, medusa={'None' if medusa is None else 'settings'}:\n{end}",
            expected=(
                "make_trainer(medusa).train() returns, and the trainer's `model` is a"
                " transformers causal LM"
            ),
            do="First make it train to the end by itself, without check-loop.",
        )
    return json.loads(out.read_text(encoding="utf-8"))


# ---- the checks


def check_loop(spec: str, medusa: Any = None) -> Iterator[LoopCheck]:
    """Train with and without the plugin, and report the findings.

    Args:
        spec: `module:function`.
        medusa: settings for the plugin; None: SETTINGS.

    Raises:
        ConfigError: `spec` does not name a function, or a training fails.
    """
    if spec.count(":") != 1:
        raise ConfigError(
            "This is not the name of a function.",
            given=spec,
            expected="module:function, e.g. my_module:make_trainer",
            do="Give the module and the function that makes the trainer, with one colon between.",
        )
    with tempfile.TemporaryDirectory() as name:
        seen = train_apart(spec, medusa or SETTINGS, Path(name))
        yield from judge(seen)
        without = train_apart(spec, None, Path(name))
        # The weights differ. A second run without the plugin shows whether the plugin is the
        # reason.
        again = (
            without
            if without["weights"] == seen["weights"]
            else train_apart(spec, None, Path(name))
        )
    steady = without["weights"] == again["weights"]
    same = without["weights"] == seen["weights"]
    if same:
        found = "the actor's weights are the same to the bit with and without the plugin"
    elif steady:
        found = "the actor's weights differ with the plugin"
    else:
        found = "even without the plugin, the loop learns something different in each call"
    do = "Look for hooks that change what the loop computes or samples."
    if not steady:
        do = "Sample greedily, and seed everything."
    yield LoopCheck("gradients", same, found, do)


def judge(seen: dict[str, Any]) -> Iterator[LoopCheck]:
    """The first nine checks; they need one training with the plugin."""
    calls = seen["calls"]
    batches = seen["batches"]
    versions = seen["versions"]
    fits = seen["fits"]
    starts = calls.count("start")
    ends = calls.count("close")
    yield LoopCheck(
        "one plugin",
        # `close` may be called more than once; further calls do nothing.
        starts == 1 <= ends,
        f"{starts} started, closed {ends} times",
        "Create one plugin per training, and close it at the end.",
    )
    if not batches:
        yield LoopCheck(
            "order of hooks",
            False,
            "no rollout_ready",
            "Call plugin.rollout_ready(rollouts) after each generation.",
        )
        return
    hooks = [call for call in calls if call not in ("start", "close")]
    # Any call may follow policy_updated, because a loop may update more often than it generates.
    after = {"before_generation": "rollout_ready", "rollout_ready": "policy_updated"}
    wrong = [f"{a}, {b}" for a, b in pairwise(hooks) if a in after and b != after[a]]
    yield LoopCheck(
        "order of hooks",
        not wrong and len(batches) >= 4 and hooks[0] == "before_generation",
        f"{len(batches)} rollout batches; out of order: {wrong[0] if wrong else 'none'}",
        "Call before_generation, rollout_ready, the scored passes, policy_updated in this order,"
        " for at least four batches.",
    )
    known = sum(batch["known"] for batch in batches) / max(
        1, sum(batch["responses"] for batch in batches)
    )
    yield LoopCheck(
        "log-probs",
        known == 1.0,
        f"{known:.0%} of the responses have a log-prob of each token",
        "Hand over log-probs of the distribution that the tokens were sampled from.",
    )
    came = sum(fit["responses"] for fit in fits) / sum(batch["responses"] for batch in batches)
    yield LoopCheck(
        "rows",
        came >= MOST,
        f"the states of {came:.0%} of the responses arrived, in {len(fits)} batches",
        "Score the rows as they were generated (padded, whole), inside plugin.actor_forward or with"
        " the tap on the model that scores.",
    )
    good = min((fit["good"] for fit in fits), default=0.0)
    yield LoopCheck(
        "states",
        good >= MOST,
        f"at least {good:.0%} of each batch's tokens have the log-prob that the states predict",
        "The states are one token off, or another model's, or the engine's weights are older than"
        " the actor's: check positions and the sync.",
    )
    yield _versions(batches, versions)
    yield LoopCheck(
        "tables",
        seen["wrong_tables"] == 0 and bool(versions),
        f"{seen['wrong_tables']} of {len(versions)} updates reported an lm_head other than the "
        "model's",
        "Call policy_updated after the optimizer's step, with the model that it changed.",
    )
    yield from _drafts(batches, seen["swapped"])


def _versions(batches: list[dict[str, Any]], versions: list[int]) -> LoopCheck:
    rising = all(a < b for a, b in pairwise(versions))
    follow = [batch["policy"] for batch in batches]
    ok = (
        rising
        and follow[-1] > follow[0]
        # The engine starts with a version that was never reported.
        and set(follow[1:]) <= {*versions, follow[0]}
        and follow == sorted(follow)
    )
    return LoopCheck(
        "versions",
        ok,
        f"reported {versions[:6]}, rollouts came from {follow[:6]}",
        "Count the actor's updates, report each of them once, and sync the engine before the next "
        "rollouts.",
    )


def _drafts(batches: list[dict[str, Any]], swapped: list[Any]) -> Iterator[LoopCheck]:
    heads = [batch["heads"] for batch in batches]
    fed = bool(swapped) and swapped[1] == swapped[2]
    yield LoopCheck(
        "newest heads",
        heads == sorted(heads) and heads[-1] > heads[0] and fed,
        f"rollouts were drafted by versions {heads[:8]}; the engine holds the last published one:"
        f" {fed}",
        "Call before_generation while the engine is idle and awake, and load the heads again "
        "after a sleep that threw them away.",
    )
    lengths = [round(batch["length"], 2) for batch in batches]
    drafts = sum(batch["drafts"] for batch in batches)
    yield LoopCheck(
        "drafts",
        # The first batch is drafted by heads that have not learned anything.
        drafts > 0 and max(lengths[1:], default=0) > lengths[0],
        f"{drafts} draft steps, tokens a step {lengths[:8]}",
        "Start the engine with our arguments, and pass its counters of each generate call on to the"
        " rollouts.",
    )


if __name__ == "__main__":
    run_arm(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))

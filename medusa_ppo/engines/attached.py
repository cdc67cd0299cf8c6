"""An engine that another loop started and drives: our heads go in, its counters come out, and it generates by itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heads.errors import EngineError, SwapError
from medusa_ppo.engines import rollout_engine as base
from medusa_ppo.types import Checked, Counters, Rollouts, Sampling, SwapReceipt
from medusa_ppo.vllm_plugin.rpc import first_of

Call = Callable[[str, tuple[Any, ...]], list[Any]]


def no_counters() -> Counters:
    """For loops that keep their engine's statistics to themselves."""
    return Counters()


class AttachedEngine(base.WorkerEngine):
    """Reaches our worker extension in a foreign engine through one function.

    Some loops put their engine to sleep and throw its weights away. What was fed last is kept in a file of our own, so that `feed_again`
    can bring it back.
    """

    def __init__(
        self,
        call: Call,
        kept_state: str | Path,
        *,
        counters: Callable[[], Counters] = no_counters,
        forget_prompts: Callable[[], object] | None = None,
        num_drafts: int = -1,
        drafting: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            call: (method, arguments) -> every worker's answer, e.g. of `LLM.collective_rpc`.
            kept_state: state file (heads.checkpoint.save_state) of the heads that the engine started with; swaps write over it.
            counters: vLLM's acceptance counters since the engine started.
            forget_prompts: resets the prefix cache; only `sync_actor` needs it.
            num_drafts: drafts per step to begin with; -1: all heads.
            drafting: arguments of `set_drafting` to begin with.

        Raises:
            UnsupportedVersionError: our plug-in is not active in a worker.
            EngineError: the engine does not draft with native heads.
        """
        self._workers_call = call
        self._kept_state = Path(kept_state)
        self._counters = counters
        self._forget_prompts = forget_prompts
        report = self.plugin_report()
        if not report["kind"]:
            raise EngineError(
                "The engine does not draft with native heads.",
                given=f"drafter {report['drafter'] or 'none'}",
                expected="an engine started with the heads' folder as the draft model, method medusa",
                do="Pass the speculative configuration on to vLLM (docs/hooks.md).",
            )
        self.max_drafts = int(report["max_drafts"])
        self.heads_version = int(self._call("medusa_checksums")["heads_version"])
        self.set_num_drafts(self.max_drafts if num_drafts < 0 else min(num_drafts, self.max_drafts))
        if drafting:
            self.set_drafting(**drafting)

    def generate(self, prompts: base.Prompts, sampling: Sampling) -> Rollouts:
        raise EngineError(
            "This engine belongs to another loop, which generates by itself.",
            given="generate()",
            expected="swaps and counters",
            do="Generate through the loop.",
        )

    def swap_heads(self, path: str | Path, version: int, checked: Checked | None = None) -> SwapReceipt:
        receipt = super().swap_heads(path, version, checked)
        fresh = self._kept_state.with_suffix(".new")
        shutil.copyfile(path, fresh)
        fresh.replace(self._kept_state)
        return receipt

    def feed_again(self) -> SwapReceipt:
        """Install the heads that the engine had before its loop threw them away."""
        if not self._kept_state.is_file():
            raise SwapError(
                "The heads that were fed last are gone.",
                given=str(self._kept_state),
                expected="a state file",
                do="Leave the run's folder alone while it runs.",
            )
        return super().swap_heads(self._kept_state, self.heads_version)

    def sync_actor(self, path: str | Path, version: int, checked: Checked | None = None) -> SwapReceipt:
        started = time.perf_counter()
        receipt = self._receipt("medusa_sync_actor", base.check_file(path, "the actor's weights"), version, checked)
        if self._forget_prompts is not None and self._forget_prompts() is False:
            raise EngineError(
                "The prefix cache could not be reset.", given="requests are running", expected="an idle engine", do="Sync between rollouts."
            )
        self.policy_version = version
        return SwapReceipt(receipt.version, receipt.checksum, time.perf_counter() - started)

    def counters(self) -> Counters:
        return self._counters()

    def close(self) -> None:
        """Nothing: the engine is its loop's."""

    def _call(self, method: str, *args: Any) -> dict[str, Any]:
        return first_of(self._workers_call(method, args))

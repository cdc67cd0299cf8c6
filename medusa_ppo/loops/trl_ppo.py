"""TRL's PPOTrainer (`trl.experimental.ppo`, up to 1.12), with heads trained beside it: it generates
with transformers, without drafts.

What is hooked, and how (TRL 1.12; tests/contracts/test_trl_ppo.py compares all of it with the
installed package):

    rollouts         the module function `batch_generation`, replaced during `train`
    log-prob pass    forward hooks on the policy, in the update's own passes; rows are known by
                     their tokens
    step, end        a TrainerCallback
    failure          `train`, overridden: no event tells of it
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heads.errors import ConfigError
from medusa_ppo.loops.loop_versions import replaced, require_loop

# First, because its error names the import that has moved.
require_loop("trl.experimental.ppo")

import torch  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl.experimental.ppo import PPOTrainer, ppo_trainer  # noqa: E402

from medusa_ppo.contract.rollouts import Sampling  # noqa: E402
from medusa_ppo.engines.rollout_engine import NoEngine  # noqa: E402
from medusa_ppo.loops.attachment import Attachment, as_config  # noqa: E402
from medusa_ppo.loops.passes import Generated  # noqa: E402
from medusa_ppo.loops.ranks import Ranks  # noqa: E402


class _Events(TrainerCallback):
    """Events of the policy, which is next to the value model in the trainer's `model`."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # accelerate wraps the pair on several devices.
        self.attachment.begin(getattr(kwargs["model"], "module", kwargs["model"]).policy)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attachment.updated(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attachment.end()


class MedusaPPOTrainer(PPOTrainer):
    """`trl.experimental.ppo.PPOTrainer` whose rollouts also train draft heads; they are in
    OUTPUT/medusa/heads-final afterwards.
    """

    medusa: Attachment | None = None
    _showing = False

    def __init__(self, *args: Any, medusa: Any = None, **kwargs: Any) -> None:
        """
        Args:
            medusa: as for MedusaGRPOTrainer.

        Raises:
            ConfigError: the trainer does something that the heads can't learn from.
        """
        super().__init__(*args, **kwargs)
        config = as_config(medusa)
        ranks = Ranks.here(
            config.model_dump(mode="json") if config else None, float(self.args.ddp_timeout)
        )
        if config is None:
            return
        if kwargs.get("peft_config") is not None:
            raise ConfigError(
                "Heads can't be trained beside this PPOTrainer.",
                given=f"peft_config={kwargs.get('peft_config')}",
                expected="the whole model, scored by the trainer's own passes",
                do="Leave `medusa` out.",
            )
        self.medusa = Attachment(config, ranks)
        self.medusa.folder = Path(self.args.output_dir) / "medusa"
        # There is no vLLM, but the plugin needs an engine for counters and swaps.
        self.medusa.engine = NoEngine() if ranks.leads else None
        self.add_callback(_Events(self.medusa))

    def train(self) -> None:
        """As TRL's."""
        if self.medusa is None:
            super().train()
            return
        # TRL calls a function of its module by this name; there is no method to override.
        telling = replaced(ppo_trainer, "batch_generation", self._generate_and_tell)
        with self.medusa.recording_failure(), telling:
            super().train()

    def generate_completions(self, sampling: bool = False) -> None:
        """Like TRL's, which shows samples of other prompts through the same function; the heads
        don't learn from these.
        """
        self._showing = True
        try:
            super().generate_completions(sampling)
        finally:
            self._showing = False

    def _generate_and_tell(
        self, model: Any, queries: torch.Tensor, size: int, pad_token_id: int, settings: Any
    ) -> Any:
        assert self.medusa is not None, "only replaced with heads"
        if self._showing:
            return _generate(model, queries, size, pad_token_id, settings)
        sampling = Sampling(
            temperature=settings.temperature, max_new_tokens=settings.max_new_tokens
        )
        with self.medusa.generation(sampling) as generated:
            query_responses, logits = _generate(model, queries, size, pad_token_id, settings)
            generated.append(rows_of(queries, query_responses, logits, pad_token_id))
        return query_responses, logits


# Saved before it is replaced, or our function would call itself.
_generate = ppo_trainer.batch_generation


def rows_of(
    queries_BQ: torch.Tensor,
    query_responses_BT: torch.Tensor,
    logits_BRV: torch.Tensor,
    pad_token_id: int,
) -> Generated:
    """TRL's padded generation as rows. `logits` are those that the tokens were sampled from, with
    the temperature applied.
    """
    width = queries_BQ.shape[1]
    responses_BR = query_responses_BT[:, width:]
    logprobs_BR = logits_BRV.float().log_softmax(-1).gather(2, responses_BR[..., None])[..., 0]
    # The trainer masks every padding token, even one that the policy sampled in the middle.
    kept_BR = responses_BR != pad_token_id
    return Generated(
        [row[row != pad_token_id].tolist() for row in queries_BQ],
        [row[kept].tolist() for row, kept in zip(responses_BR, kept_BR, strict=True)],
        [row[kept].tolist() for row, kept in zip(logprobs_BR, kept_BR, strict=True)],
    )

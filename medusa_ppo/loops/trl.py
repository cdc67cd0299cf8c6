"""TRL's GRPO and RLOO trainers with draft heads: `MedusaGRPOTrainer(..., medusa={...})` instead of
`GRPOTrainer(...)`.

What is hooked, and how (TRL 1.16; tests/contracts/test_trl.py compares all of it with the installed
package):

    vLLM's start     the trainer builds our subclass of VLLMGeneration, which adds our arguments to
                     its call of `LLM` (TRL has no option) and attaches to the engine before TRL may
                     put it to sleep
    before, after    `VLLMGeneration.generate`, overridden: newer heads go in; tokens and behaviour
                     log-probs come out
    weight sync      `VLLMGeneration.sync_weights`, overridden: the heads follow
    log-prob pass    forward hooks on the model itself; rows are known by their tokens
    step, end        a TrainerCallback
    failure          `train`, overridden: no event tells of it
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from pathlib import Path
from typing import Any

from heads.errors import ConfigError
from medusa_ppo.loops.loop_versions import replaced, require_loop

require_loop("trl")  # First, because its error names the import that has moved.

import trl  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402

from medusa_ppo.contract.rollouts import Sampling  # noqa: E402
from medusa_ppo.loops.attachment import Attachment, as_config  # noqa: E402
from medusa_ppo.loops.passes import Generated  # noqa: E402
from medusa_ppo.loops.ranks import Ranks  # noqa: E402
from medusa_ppo.runtime.control_guard import token_header  # noqa: E402
from medusa_ppo.vllm_plugin.vllm_versions import is_cpu_build  # noqa: E402

__all__ = ["MedusaCallback", "MedusaGRPOTrainer", "MedusaMixin", "MedusaRLOOTrainer"]

logger = logging.getLogger(__name__)


class MedusaGeneration(vllm_generation.VLLMGeneration):
    """TRL's generation with our heads in its vLLM."""

    def __init__(
        self, attachment: Attachment, *, model: Any, mode: str = "colocate", **arguments: Any
    ) -> None:
        # Checked before vLLM starts, which takes long.
        _refuse(arguments)
        self.attachment = attachment
        self.told_of_images = False
        # vLLM's CPU build packs its weights; TRL's sync, one parameter at a time, can't refill
        # them.
        self.packed_weights = is_cpu_build()
        if mode == "server":
            client = _WithoutCommunicator if self.packed_weights else _Client
            with replaced(vllm_generation, "VLLMClient", client):
                super().__init__(model=model, mode=mode, **arguments)
            attachment.attach_server(model, lambda: self.vllm_client.base_url)
        else:
            extra = attachment.engine_arguments(model)
            start = functools.partial(self._start, vllm_generation.LLM, extra)
            with replaced(vllm_generation, "LLM", start):
                super().__init__(model=model, mode=mode, **arguments)
        if self.logprobs is None:
            # RLOO doesn't request the sampled tokens' log-probs, and ignores them. A value above 0
            # would put the most likely token's first instead of the sampled one's (see `_sampled`).
            self.logprobs = 0

    def _start(self, llm_class: Any, extra: dict[str, Any], **arguments: Any) -> Any:
        """In place of TRL's call of `LLM`: with our arguments, and attached at once. With sleep
        mode TRL puts the engine to sleep as soon as it has it, and heads can't be looked at there:
        their memory is not mapped any more.
        """
        # Ours come last, because engine.extra overrides TRL's arguments.
        llm = llm_class(**{**arguments, **extra})
        first_of_its_engine = self.accelerator.process_index % self.tensor_parallel_size == 0
        self.attachment.attach_llm(llm, counts=first_of_its_engine)
        return llm

    def sync_weights(self) -> None:
        """Send the actor's weights to vLLM, and update what depends on them."""
        if not self.packed_weights:
            super().sync_weights()
        elif self.mode == "server":
            self.attachment.sync_by_file(self._iter_named_params())
            return
        else:
            self.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": self._iter_named_params()}
            )
            self.llm.reset_prefix_cache()
        self.attachment.weights_synced(
            lost_heads=self.mode == "colocate" and self.enable_sleep_mode
        )

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, ...]:
        """Like TRL's, but newer heads go in first, and training rollouts go to the plugin."""
        if self.mode == "colocate" and self._llm_weights_sleeping:
            # TRL would wake the engine a moment later, but its weights must be awake before heads
            # can be loaded.
            self.sync_weights()
        training = bool(self.model.training)
        with self.attachment.generation(self.sampling(num_generations)) as generated:
            answer = super().generate(prompts, images, num_generations, profiler)
            if training and images is not None:
                self._tell_of_images()
            elif training:
                generated.append(Generated(prompts, answer[1], _sampled(answer[2])))
        return answer

    def _tell_of_images(self) -> None:
        if not self.told_of_images:
            self.told_of_images = True
            logger.warning(
                "The heads learn nothing from rollouts with images: TRL's rows are known by their"
                " tokens alone. The engine drafts in them all the same. Train heads on text, or"
                " leave `medusa` out."
            )

    def sampling(self, num_generations: int) -> Sampling:
        """This generation's sampling in our form."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            # TRL and vLLM write "no top-k" as None, 0 or -1.
            top_k=max(self.top_k or 0, 0),
            max_new_tokens=self.max_completion_length,
            responses_per_prompt=num_generations,
        )


class MedusaCallback(TrainerCallback):
    """The trainer's own events: the companion lives as long as the training, and learns of every
    update.
    """

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Before this event the model is not yet wrapped and distributed.
        self.attachment.begin(kwargs["model"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attachment.updated(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attachment.end()


class MedusaMixin:
    """Mix-in to put before a TRL trainer in a class's bases. Without `medusa=` the trainer is
    TRL's, to the bit.
    """

    medusa: Attachment | None = None

    def __init__(self, *args: Any, medusa: Any = None, **kwargs: Any) -> None:
        """
        Args:
            medusa: a RunConfig, its sections as a mapping, or the path of a YAML file; only
                `heads`, `companion`, `engine` (drafting and `extra`) and `seed` are read. None, or
                neither drafting nor a companion: TRL's trainer unchanged.

        Raises:
            ConfigError: the trainer does something that can't be combined with draft heads.
        """
        config = as_config(medusa)
        ranks = Ranks.here(
            config.model_dump(mode="json") if config else None, _patience(args, kwargs)
        )
        if config is None:
            super().__init__(*args, **kwargs)
            return
        named = [
            name for name in ("tools", "rollout_func", "environment_factory") if kwargs.get(name)
        ]
        if getattr(kwargs.get("args"), "torch_compile", False):
            named.append("torch_compile=True")
        if named:
            raise ConfigError(
                "Draft heads can't learn from this kind of rollout yet.",
                given=", ".join(named),
                expected="prompts and single responses, scored by an actor that is not compiled",
                do="Leave `medusa` or these arguments out.",
            )
        attachment = Attachment(config, ranks)
        # GRPO and RLOO each import the name into a module of their own.
        module = next(
            sys.modules[kind.__module__]
            for kind in type(self).__mro__
            if kind.__module__.startswith("trl.trainer.")
        )
        with replaced(module, "VLLMGeneration", functools.partial(MedusaGeneration, attachment)):
            super().__init__(*args, **kwargs)
        # Checked only now: it is a field of the arguments, which TRL may create itself.
        if not getattr(self, "use_vllm", False):
            raise ConfigError(
                "Draft heads need vLLM.",
                given="use_vllm=False",
                expected="use_vllm=True",
                do="Set it in the trainer's args.",
            )
        self.medusa = attachment
        attachment.folder = Path(self.args.output_dir) / "medusa"  # type: ignore[attr-defined]
        self.add_callback(MedusaCallback(attachment))  # type: ignore[attr-defined]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's. There is no event for a training that fails."""
        with self.medusa.recording_failure() if self.medusa else contextlib.nullcontext():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Like the trainer's, with the plugin's figures added."""
        figures = self.medusa.figures() if self.medusa is not None else {}
        super().log({**logs, **figures}, start_time)  # type: ignore[misc]


class MedusaGRPOTrainer(MedusaMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with draft heads."""


class MedusaRLOOTrainer(MedusaMixin, trl.RLOOTrainer):
    """`trl.RLOOTrainer` with draft heads."""


def _patience(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Seconds that the trainer's processes may wait for each other: `ddp_timeout` of its `args`,
    which may also come by position; 0 if TRL makes them itself.
    """
    given = (kwargs.get("args"), *args)
    return next((float(found.ddp_timeout) for found in given if hasattr(found, "ddp_timeout")), 0.0)


def _refuse(arguments: dict[str, Any]) -> None:
    if arguments.get("min_p"):
        raise ConfigError(
            "vLLM refuses min_p with speculative decoding.",
            given=f"min_p={arguments['min_p']}",
            expected="min_p=0",
            do="Use top_p.",
        )


def _sampled(logprobs: list[list[list[float | None]]]) -> list[list[float | None]]:
    """The first of each token's log-probs, which belongs to the sampled token."""
    return [[token[0] for token in sequence] for sequence in logprobs]


class _Client(vllm_generation.VLLMClient):
    """TRL's client, which sends our token to the server (`loops.serve`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.session.headers.update(token_header())


class _WithoutCommunicator(_Client):
    """TRL opens an NCCL group to the server as soon as it sees it; the CPU build has none, and
    weights go through a file.
    """

    def init_communicator(self, device: Any = 0) -> None:
        logger.debug("no communicator: weights go through a file")

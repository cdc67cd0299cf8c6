"""verl's actor workers as a tap sees them, and verl with a stand-alone companion: in each of its
trainer modes, asynchronous ones too, its workers tap their own passes, and its engines load newer
heads from a feed.

    export MEDUSA_PPO_COMPANION=http://HOST:8461 MEDUSA_PPO_FEED=http://HOST:8460
    spec=actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config
    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=colocate_async \\
        +$spec.method=medusa +$spec.model=HEADS +$spec.num_speculative_tokens=3 ...

With the first variable, our plugin (verl_plugin.py) wraps two methods of verl's worker in each of
its processes (verl 0.9; tests/contracts/test_verl.py compares them with the installed package):

    log-prob pass    `ActorRolloutRefWorker.compute_log_prob`: every rank taps its rows
    update           `ActorRolloutRefWorker.update_actor`: the tap learns that the actor has
                     changed. Without a log-prob pass before it (bypass mode), it is tapped itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from verl.single_controller.base.decorator import (
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.device import get_device_name

from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.loops.loop_versions import require_loop
from medusa_ppo.loops.passes import Row
from medusa_ppo.loops.remote import refuse
from medusa_ppo.loops.tap import CompanionTap
from medusa_ppo.loops.worker_tap import own_tap

FSDP = ("fsdp", "fsdp2")


# ---- verl's workers


@contextlib.contextmanager
def on_device(engine: Any) -> Iterator[None]:
    """During the block, weights that verl keeps off the GPU are on it."""
    if engine.is_param_offload_enabled:
        engine.to(get_device_name(), model=True, optimizer=False, grad=False)
    try:
        yield
    finally:
        if engine.is_param_offload_enabled:
            engine.to("cpu", model=True, optimizer=False, grad=False)


def sampling_of(rollout: Any) -> Sampling:
    """verl's sampling of its rollouts in our form."""
    return Sampling(
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=max(int(rollout.top_k), 0)
    )


def rows_of(data: Any) -> tuple[list[Row], list[int]]:
    """The prompts and responses in verl's nested batch that heads can learn from, and the indices
    of their rows.

    Rows with tokens between the response's own (tools' answers) are left out.
    """
    rows = []
    kept = []
    for index, (ids, mask) in enumerate(
        zip(data["input_ids"].unbind(), data["response_mask"].unbind(), strict=True)
    ):
        if mask.numel() and bool(mask.bool().all()):
            tokens = ids.tolist()
            first = ids.numel() - mask.numel()
            rows.append((tokens[:first], tokens[first:]))
            kept.append(index)
    return rows, kept


def response_logprobs(log_probs: torch.Tensor, response_mask: torch.Tensor) -> list[torch.Tensor]:
    """The response part of verl's log-probs, row by row: they are nested over prompt and response,
    and shifted left by one.
    """
    pairs = zip(log_probs.unbind(), response_mask.unbind(), strict=True)
    return [
        values[values.numel() - mask.numel() - 1 : values.numel() - 1] for values, mask in pairs
    ]


def unsupported_actor(part: Any) -> dict[str, bool]:
    """Settings of verl's `actor_rollout_ref` that no tap can be combined with, and whether they are
    on.
    """
    actor = part.actor
    model = part.model
    return {
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size > 1": (
            int(actor.get("ulysses_sequence_parallel_size", 1)) > 1
        ),
        "actor_rollout_ref.model.lora_rank > 0": int(model.get("lora_rank", 0)) > 0,
        "actor_rollout_ref.model.lora.rank > 0": int((model.get("lora") or {}).get("rank", 0)) > 0,
        "actor_rollout_ref.model.lora_adapter_path": bool(model.get("lora_adapter_path")),
        "actor_rollout_ref.model.mtp.enable": bool((model.get("mtp") or {}).get("enable", False)),
    }


# ---- with a stand-alone companion


def tap_worker(worker: type[Any]) -> None:
    """Wrap the two methods of verl's `ActorRolloutRefWorker` in this process. In place, because
    each of verl's trainers names this class or a subclass of its own.

    Raises:
        UnsupportedVersionError: as `require_loop`.
    """
    require_loop("verl.worker")
    score, train = worker.compute_log_prob, worker.update_actor

    # As verl's own are: its decorator spreads a call over the ranks and fetches its data.
    spread = register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))

    @spread
    def compute_log_prob(self: Any, data: Any) -> Any:
        tap = _tap_of(self)
        rows, kept = rows_of(data)
        logprobs = None if tap.cuts else [torch.zeros(len(answer)) for _, answer in rows]
        with tap(*_sides(rows), logprobs):
            output = score(self, data)
            if logprobs is not None:
                found = response_logprobs(output["log_probs"], data["response_mask"])
                for values, index in zip(logprobs, kept, strict=True):
                    values.copy_(found[index])
        self.medusa_scored = True
        return output

    @spread
    def update_actor(self: Any, data: Any) -> Any:
        tap = _tap_of(self)
        scored = vars(self).get("medusa_scored", False)
        rows = rows_of(data)[0]
        with contextlib.nullcontext() if scored else tap(*_sides(rows)):
            output = train(self, data)
        self.medusa_scored = False
        tap.updated()
        return output

    worker.compute_log_prob, worker.update_actor = compute_log_prob, update_actor


def _sides(rows: list[Row]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Prompts and responses."""
    return [prompt for prompt, _ in rows], [answer for _, answer in rows]


def _tap_of(worker: Any) -> CompanionTap:
    """The tap of a rank.

    Raises:
        ConfigError: settings that a tap can't be combined with.
        CompanionError, ModelError: as `CompanionTap`.
    """
    strategy = worker.config.actor.strategy
    refuse(
        "verl",
        {
            f"actor_rollout_ref.actor.strategy={strategy} (not {' or '.join(FSDP)})": (
                strategy not in FSDP
            ),
            **unsupported_actor(worker.config),
        },
    )
    sampling = sampling_of(worker.config.rollout)
    engine = worker.actor.engine
    return own_tap(
        worker,
        engine.module,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        reading=functools.partial(on_device, engine),
    )

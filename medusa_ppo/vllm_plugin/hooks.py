"""Our proposer inside vLLM's V1 model runner: what wraps the private names that registration.py
lists.

What is broken in vLLM's CPU build, and in its older releases, is mended in mends.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm.v1.worker.gpu_model_runner as model_runner
import vllm.v1.worker.gpu_worker as gpu_worker
from vllm import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from heads.errors import UnsupportedVersionError
from medusa_ppo.vllm_plugin.patches import CPU_MENDS, Mend, mends_of_older, refuse_lossy_rule
from medusa_ppo.vllm_plugin.registration import (
    HOOKS,
    TESTED,
    V2,
    Hook,
    can_transfer,
    compare,
    drafter_of,
    has_medusa,
    has_v2,
    heads_folder,
    release,
    require_vllm,
    v2_asked,
    vllm_version,
)
from medusa_ppo.vllm_plugin.worker_calls import TRANSFER

V2_PLACES = {"vllm.v1.worker.gpu.model_runner.init_speculator"}
"""Where our speculator's module has put something in its place (`Installed.places`)."""


@dataclass
class Installed:
    """What `install` did in this process; `mends` are names for reports, `proposer` our proposer
    class.
    """

    mends: list[str] = field(default_factory=list)
    places: dict[str, tuple[Any, str, Callable[..., Any]]] = field(default_factory=dict)
    """Where something was replaced: holder, attribute, what stood there."""
    proposer: type | None = None


INSTALLED = Installed()


def check_hooks(hooks: tuple[Hook, ...] = HOOKS) -> list[str]:
    """What is missing or has another signature in the installed vLLM; empty when all is as it was
    checked.
    """
    originals = {
        place: original for place, (_, _, original) in INSTALLED.places.items()
    }  # Ours may stand there by now.
    return [f"{found.where} {found.fault}" for found in compare(originals, hooks) if found.fault]


def install(proposer: type) -> Installed:
    """Mend vLLM on the CPU and let `proposer` draft for heads that we wrote; does nothing the
    second time.

    Raises:
        UnsupportedVersionError: another version of vLLM, or a name that is not as it was checked.
    """
    if INSTALLED.proposer is None:
        _install_for_v1(proposer)
    if v2_asked() and has_v2(vllm_version()) and INSTALLED.places.keys().isdisjoint(V2_PLACES):
        _refuse_faults(tuple(hook for hook in HOOKS if hook.runner == V2))
        for holder, name, wrapper in importlib.import_module(
            "medusa_ppo.vllm_plugin.speculator"
        ).PLACES:
            _wrap(holder, name, wrapper)
    return INSTALLED


def _refuse_faults(hooks: tuple[Hook, ...]) -> None:
    faults = check_hooks(hooks)
    if faults:
        raise UnsupportedVersionError(
            "vLLM's inner names are not those that medusa-ppo was checked with.",
            given=f"vLLM {vllm_version()}: {'; '.join(faults)}",
            expected="the names in medusa_ppo/vllm_plugin/registration.py",
            do=f"Install a released vLLM that was tested: {', '.join(TESTED)}.",
        )


def _install_for_v1(proposer: type) -> None:
    version = require_vllm()
    _refuse_faults(tuple(hook for hook in HOOKS if hook.runner != V2))
    if current_platform.is_cpu():
        _mend(CPU_MENDS)
    runner = model_runner.GPUModelRunner
    _wrap(runner, "__init__", _with_our_proposer)
    _wrap(runner, "propose_draft_token_ids", _with_draft_context)
    _wrap(runner, "_get_spec_decode_draft_probs", _with_kept_draft_probs)
    _wrap(runner, "_input_fits_in_drafter", _drafting_to_the_end)
    _wrap(runner, "_sample", _plain_without_drafts)
    _wrap(gpu_worker.Worker, "wake_up", _with_heads_looked_at)
    _mend(mends_of_older(release(version)))
    if has_medusa(version) and "MedusaPPOModel" not in ModelRegistry.get_supported_archs():
        # The name of conditioned kinds in config.json. vLLM only looks it up; our proposer builds
        # the heads itself.
        ModelRegistry.register_model("MedusaPPOModel", "vllm.model_executor.models.medusa:Medusa")
    if can_transfer(version):
        with contextlib.suppress(ValueError):  # It is there already.
            importlib.import_module(
                "vllm.distributed.weight_transfer"
            ).WeightTransferEngineFactory.register_engine(
                TRANSFER, "medusa_ppo.vllm_plugin.transfer_engine", "BroadcastEngine"
            )
    INSTALLED.proposer = proposer


def _mend(mends: tuple[Mend, ...]) -> None:
    for mend in mends:
        _wrap(mend.holder, mend.attribute, mend.mend)
        INSTALLED.mends += [mend.name] if mend.name else []


def uninstall() -> None:
    """Put everything back; for tests that show what happens without the mends."""
    for holder, name, original in INSTALLED.places.values():
        setattr(holder, name, original)
    INSTALLED.mends.clear()
    INSTALLED.places.clear()
    INSTALLED.proposer = None


def _wrap(
    holder: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    original = getattr(holder, name)
    INSTALLED.places.setdefault(
        f"{holder.__name__}.{name}", (holder, name, original)
    )  # A name may be wrapped twice.
    setattr(holder, name, wrapper(original))


# ---- our proposer inside vLLM's runner


class CustomClass:
    """What vLLM makes where it has no Medusa of its own (from 0.33 on); our proposer extends it
    there, and takes its place.
    """

    def __init__(self, vllm_config: Any, device: torch.device | None = None) -> None:
        self.vllm_config = vllm_config
        self.spec_config = vllm_config.speculative_config
        self.device = device
        self.hidden_size = vllm_config.model_config.get_hidden_size()
        self.num_speculative_tokens = self.spec_config.num_speculative_tokens

    def propose(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedVersionError(
            "Nothing has taken the place of this class in vLLM's model runner.",
            given="a worker without the medusa-ppo plug-in, or no heads that it wrote",
            expected="additional_config with medusa_ppo_heads, a folder of heads",
            do="Leave VLLM_PLUGINS unset, or add medusa_ppo to it; name the heads' folder.",
        )


Drafter: Any = (
    importlib.import_module("vllm.v1.spec_decode.medusa").MedusaProposer
    if has_medusa(vllm_version())
    else CustomClass
)
"""What our proposer extends: vLLM's Medusa asks whether it is one."""


def is_native(folder: str | Path) -> bool:
    """The folder holds heads that heads/checkpoint.py wrote."""
    try:
        return isinstance(
            json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get(
                "medusa_ppo"
            ),
            dict,
        )
    except (OSError, ValueError, AttributeError):
        return False


def _with_our_proposer(original: Callable[..., None]) -> Callable[..., None]:
    """Heads that we wrote get our proposer; any other Medusa folder keeps vLLM's own."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        stock: Any = getattr(self, "drafter", None)
        folder = heads_folder(stock.vllm_config) if type(stock) is Drafter else ""
        if INSTALLED.proposer and folder and is_native(folder):
            refuse_lossy_rule(stock.spec_config)
            self.drafter = INSTALLED.proposer(stock.vllm_config, self.device)

    return __init__


def _is_ours(runner: Any) -> bool:
    return INSTALLED.proposer is not None and isinstance(drafter_of(runner), INSTALLED.proposer)


def _with_draft_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask our proposer for drafts, once it knows which tokens were just sampled, and from which
    states.
    """
    states = list(inspect.signature(original).parameters).index("sample_hidden_states") - 3

    @functools.wraps(original)
    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not _is_ours(self):
            return original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        _seat(self)
        drafted = [
            len(scheduler_output.scheduled_spec_decode_tokens.get(key, ()))
            for key in self.input_batch.req_ids
        ]
        hidden_TD = args[states] if len(args) > states else kwargs["sample_hidden_states"]
        self.drafter.before_step(
            sampled_token_ids, drafted, scheduler_output.total_num_scheduled_tokens, hidden_TD
        )
        hidden_BD = _last_states(hidden_TD, sampled_token_ids, drafted)
        return self.drafter.propose(
            scheduler_output.num_spec_tokens_to_schedule,
            hidden_BD,
            self.input_batch.sampling_metadata,
        )

    return propose_draft_token_ids


def _last_states(
    hidden_TD: torch.Tensor, sampled_token_ids: Sequence[Sequence[int]], drafted: Sequence[int]
) -> torch.Tensor:
    """h_t `[B, D]` of each request: where its last token was sampled. There is a row for each draft
    of a request, and one more.
    """
    if hidden_TD.shape[0] == len(sampled_token_ids):
        return hidden_TD
    rows = []
    begin = 0
    for tokens, count in zip(sampled_token_ids, drafted, strict=True):
        rows.append(begin + max(len(tokens) - 1, 0))
        begin += count + 1
    return hidden_TD[torch.tensor(rows).to(hidden_TD.device, non_blocking=True)]


def _with_kept_draft_probs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_spec_decode_draft_probs(self: Any, spec_decode_metadata: Any) -> Any:
        if not _is_ours(self):
            return original(self, spec_decode_metadata)
        _seat(self)
        meta = spec_decode_metadata
        batch = self.input_batch
        return self.drafter.proposed(
            meta.num_draft_tokens,
            meta.draft_token_ids,
            batch.vocab_size,
            batch.sampling_metadata.all_greedy,
        )

    return _get_spec_decode_draft_probs


def _seat(runner: Any) -> None:
    batch = runner.input_batch
    runner.drafter.seat(
        batch.req_ids,
        runner.requests,
        batch.num_tokens_no_spec[: batch.num_reqs],
        batch.token_ids_cpu,
    )


def _drafting_to_the_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Failure: near max_model_len vLLM gives every request as many drafts of token 0 as it
    reserves, whatever num_drafts and the chooser say, and counts them. Heads have no positions, so
    there is nothing that they could not draft at; the scheduler cuts what is too long.

    Trigger: any request within K tokens of max_model_len.
    """

    @functools.wraps(original)
    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        return (
            common_attn_metadata is not None
            if _is_ours(self)
            else original(self, common_attn_metadata)
        )

    return _input_fits_in_drafter


def _plain_without_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    """A step in which nothing was drafted samples as an engine without speculation does, and costs
    as much.

    Seeded requests are left out while others may draft: how their tokens are drawn must not depend
    on who shares their step. (vLLM 0.31 and older have no metadata of a step without drafts; on the
    CPU, where we draw the tokens, it is made here.)
    """

    @functools.wraps(original)
    def _sample(self: Any, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        if _is_ours(self) and logits is not None:
            seeded = self.input_batch.generators and self.drafter.num_drafts
            if (
                spec_decode_metadata is not None
                and not any(spec_decode_metadata.num_draft_tokens)
                and not seeded
            ):
                spec_decode_metadata = None
            elif spec_decode_metadata is None and seeded and current_platform.is_cpu():
                spec_decode_metadata = SpecDecodeMetadata.make_dummy(
                    [[]] * len(logits), logits.device
                )
                spec_decode_metadata.bonus_logits_indices = torch.arange(
                    len(logits), device=logits.device
                )
            if spec_decode_metadata is not None and self.drafter.memory is not None:
                meta = spec_decode_metadata
                temperature_B = self.input_batch.sampling_metadata.temperature
                self.drafter.memory.judge(
                    logits,
                    meta.target_logits_indices,
                    meta.draft_token_ids,
                    meta.num_draft_tokens,
                    temperature_B,
                )
        return original(self, logits, spec_decode_metadata)

    return _sample


def _with_heads_looked_at(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whoever wakes the engine: heads that a deep sleep threw away are noticed before it drafts.
    (The CPU's worker never really sleeps.)
    """

    @functools.wraps(original)
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        result = original(self, tags)
        if (tags is None or "weights" in tags) and _is_ours(self.model_runner):
            drafter_of(self.model_runner).held_version()
        return result

    return wake_up

"""verl's Megatron engine, tapped: whole rows and tables of one model replica come together on the rank where verl's own outputs do.

The engine may be cut by tensor, pipeline (virtual stages too), sequence and context parallelism. Each micro-batch comes to
`MegatronEngine.forward_step` on every rank, its rows whole and without padding. So that method is wrapped for the time of a log-prob pass,
and our tap is opened around each call of it. One replica is tapped; verl's other data-parallel replicas do not notice.

Shape letters: T tokens of a row, D hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from heads.errors import ConfigError
from medusa_ppo.actors.megatron import MegatronActor
from medusa_ppo.loops.passes import RowTap
from medusa_ppo.loops.remote import Tables
from medusa_ppo.loops.verl.verl_trainer import on_device
from medusa_ppo.types import Sampling


class MegatronEngineTap(RowTap):
    """Every rank of the tapped replica has one, and calls all its methods when the others do: rows and tables are gathered."""

    def __init__(self, engine: Any, sampling: Sampling, max_bytes: int) -> None:
        """
        Args:
            engine: verl's MegatronEngine, initialised.
            sampling, max_bytes: as of RowTap.

        Raises:
            ModelError: not a GPTModel (one with an image tower, say).
            ConfigError: the rows are cut for context parallelism in a way that the tap doesn't know.
        """
        super().__init__(sampling, max_bytes)
        self._engine = engine
        self._actor = MegatronActor(engine.module, engine.model_config.hf_config.vocab_size, with_embedding=True)
        layout = engine._get_context_parallel_layout(self._actor.model)
        if layout != "zigzag" and engine.engine_config.context_parallel_size > 1:
            raise ConfigError(
                "The states of this model's rows can't be put together.",
                given=f"context parallel layout {layout}",
                expected="zigzag",
                do="Set actor_rollout_ref.actor.megatron.context_parallel_size=1, or train without draft heads.",
            )
        self.reports = self._actor.reports

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        engine, whole = self._engine, self._engine.forward_step

        def forward_step(batch_iter: Iterator[Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not any(part is self._actor.model for part in model.modules()):
                return whole(batch_iter, model, *args, **kwargs)  # Another virtual pipeline stage.
            micro_batch = next(batch_iter)
            with self._actor.tap() as tap:
                answer = whole(iter((micro_batch,)), model, *args, **kwargs)
            if self.reports:
                for ids_T, hidden_TD in zip(micro_batch["input_ids"].unbind(), tap.hidden_BTD, strict=True):
                    self._see(ids_T, hidden_TD[: ids_T.numel()])
            return answer

        engine.forward_step = forward_step
        try:
            yield
        finally:
            del engine.forward_step  # The class's own stands behind it.

    def tables(self) -> Tables | None:
        """lm_head and embedding, on the rank that reports."""
        with on_device(self._engine):
            self._actor.refresh()
        return (self._actor.lm_head_VD, self._actor.embedding_VD) if self.reports else None

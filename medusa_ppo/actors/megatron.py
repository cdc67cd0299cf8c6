"""Actors from megatron-core: taps final hidden states of a GPTModel where they are, whatever its
parallelism.

Shape letters: B batch rows, T tokens, S tokens of one rank, D hidden, V vocabulary.

"Final hidden state" is what `output_layer` reads: after the final norm, on the last pipeline stage.
A hook in front of that layer sees it before anything is copied. Partial states (sequence and
context parallelism) go to the first rank of their groups, in parallel with the forward pass. Other
replicas are not involved: each data-parallel replica has one rank that `reports` and hands in its
own share.

    actor = MegatronActor(model, vocab_size)         # every rank
    plugin = ... if actor.reports else None
    with plugin.actor_forward(actor, mask, rows) if plugin else actor.tap():     # every rank
        forward(model)                               # or a pipeline schedule's micro-batches
    actor.refresh()                                  # every rank, after the optimizer's step
    if plugin: plugin.policy_updated(actor, version)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import nn

from heads.errors import DataError, ModelError
from medusa_ppo.actors.actor_view import ActorView
from medusa_ppo.actors.megatron_layout import (
    Gathering,
    Groups,
    Packing,
    gather_rows,
    join_context,
    rank_of,
    size_of,
)

Pick = Callable[[int, torch.Tensor], torch.Tensor]
"""Given a forward pass's number and its states `BTD`: what to keep of them."""


class MegatronActor(ActorView):
    """One rank's part of a GPTModel.

    Attributes:
        model: the GPTModel itself; of virtual pipeline stages the one that holds the output layer,
            or the last.
        groups: this rank's process groups.
        reports: this rank hands in its replica's hidden states: first tensor and context rank of
            the last pipeline stage.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        vocab_size: int,
        *,
        groups: Groups | None = None,
        with_embedding: bool = False,
    ) -> None:
        """
        Args:
            model: GPTModel, bare or wrapped (DistributedDataParallel, Float16Module), or the list
                of its virtual pipeline stages.
            vocab_size: rows of lm_head without Megatron's padding.
            groups: this rank's process groups; None: those that the model was built with.
            with_embedding: `refresh` also brings the input embedding (heads of kind hydra).

        Raises:
            ModelError: not a GPTModel.
        """
        stages = [_unwrap(stage) for stage in ([model] if isinstance(model, nn.Module) else model)]
        # With virtual pipeline stages a rank has several models, at most one of which has the
        # output layer.
        self.model = next((stage for stage in stages if stage.post_process), stages[-1])
        self._first = next((stage for stage in stages if stage.pre_process), stages[0])
        self.groups = groups or groups_of(self.model)
        self.reports = bool(self.model.post_process) and self.groups.leads
        self._vocab_size = vocab_size
        self._with_embedding = with_embedding
        self._tables: dict[str, torch.Tensor] = {}

    def tap(self, pick: Pick | None = None) -> MegatronTap:
        return MegatronTap(self.model, self.groups, pick)

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, padding included; live, not a copy."""
        # A tied output layer has no weight of its own: it gets one at each call.
        tied = self.model.share_embeddings_and_output_weights
        return cast(
            torch.Tensor,
            (
                self.model.shared_embedding_or_output_weight()
                if tied
                else self.model.output_layer.weight
            ),
        )

    def refresh(self, *, embedding: bool = True) -> None:
        """Bring the whole tables to the ranks that report. Every rank calls it, before the first
        use and after the weights changed.

        Args:
            embedding: False: it is not read before the next call. The same on every rank.
        """
        table = (
            gather_rows(self.output_weight, self.groups.tensor, self._vocab_size)
            if self.model.post_process
            else None
        )
        if table is not None:
            self._tables["lm_head"] = table
        if self._with_embedding and not embedding:
            self._tables.pop("embedding", None)
        elif self._with_embedding:
            own = self._first.embedding.word_embeddings.weight if self._first.pre_process else None
            table = None if own is None else gather_rows(own, self.groups.tensor, self._vocab_size)
            moved = self._to_last_stage(table)
            if moved is not None:
                self._tables["embedding"] = moved

    @property
    def lm_head_VD(self) -> torch.Tensor:
        """The table at the last `refresh`, on the CPU; only on ranks that report."""
        return self._table("lm_head")

    @property
    def embedding_VD(self) -> torch.Tensor:
        """The table at the last `refresh`, on the CPU; only on ranks that report, and only with
        `with_embedding`.
        """
        return self._table("embedding")

    def _table(self, name: str) -> torch.Tensor:
        if name not in self._tables:
            raise DataError(
                f"This rank does not have the whole {name}.",
                given=f"reports={self.reports}, with_embedding={self._with_embedding}",
                expected="a rank that reports, after refresh() on every rank",
                do="Call refresh() on every rank, and use the plugin where `reports` is true.",
            )
        return self._tables[name]

    def _to_last_stage(self, table_VD: torch.Tensor | None) -> torch.Tensor | None:
        """Send a table from the first pipeline stage to the last, between the leading ranks."""
        group = self.groups.pipeline
        stages = size_of(self.groups.pipeline)
        # Only between the leading ranks: they have the whole table, and no other rank needs it.
        if stages == 1 or not self.groups.leads or group is None:
            return table_VD
        device = next(self.model.parameters()).device
        if rank_of(group) == 0 and table_VD is not None:
            dist.send(table_VD.to(device), group=group, group_dst=stages - 1)
            return None
        if rank_of(group) == stages - 1:
            weight = self.output_weight
            received_VD = torch.empty(
                self._vocab_size, weight.shape[1], dtype=weight.dtype, device=device
            )
            dist.recv(received_VD, group=group, group_src=0)
            return received_VD.cpu()
        return None


class MegatronTap:
    """Context manager that records the final hidden states of all forward passes inside it, on the
    rank that reports.

    The hooks only read: they return nothing and detach what they keep. Every rank of a replica must
    enter it, or none.

    Attributes:
        picked: `pick`'s result for each forward pass, in order.
    """

    def __init__(self, model: GPTModel, groups: Groups, pick: Pick | None = None) -> None:
        """
        Args:
            pick: called with each pass's number and its states as soon as these are complete, while
                the next passes run; its result is kept instead. None: all states are kept, on the
                actor's device.
        """
        self._model = model
        self._groups = groups
        self._pick = pick
        self.picked: list[torch.Tensor] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._passes: list[tuple[Gathering, Packing | None]] = []
        self._latest: torch.Tensor | None = None
        self._packing: Packing | None = None
        self._rows: list[torch.Tensor] | None = None

    def __enter__(self) -> MegatronTap:
        self._passes = []
        self._rows = None
        self.picked = []
        if self._model.post_process:
            # The layer's own hook sees the states before it copies them for its product.
            self._handles = [
                self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
                self._model.output_layer.register_forward_pre_hook(self._see, with_kwargs=True),
                self._model.register_forward_hook(self._end),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        # If the pass failed here, it may have failed on other ranks too, and a gather would wait
        # for them.
        if kind is None:
            self._rows = self._put_together()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._latest = None
        self._packing = Packing.read(named.get("packed_seq_params"))

    def _see(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        # With multi-token prediction the layer is called for those tokens first; the last call is
        # the model's own.
        self._latest = (args[0] if args else named["input_"]).detach()

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._latest is None:
            raise ModelError(
                "The forward pass did not reach its output layer.",
                given=type(module).__name__,
                expected="a GPTModel that computes logits or a loss",
                do="Tap the log-prob or update pass.",
            )
        spread = self._groups.tensor if self._model.config.sequence_parallel else None
        # Without sequence parallelism each tensor rank has whole states: the first one's are
        # enough.
        if spread is not None or rank_of(self._groups.tensor) == 0:
            self._passes.append((Gathering(self._latest, spread), self._packing))
            # One behind: it was gathered during the pass that has just ended.
            if self._pick is not None and len(self._passes) > 1:
                self._take(self._passes.pop(0))
        self._latest = None

    def _take(self, one: tuple[Gathering, Packing | None]) -> None:
        hidden_BTD = self._whole(*one)
        if hidden_BTD is not None:
            assert self._pick is not None, "asked for"
            self.picked.append(self._pick(len(self.picked), hidden_BTD))

    def _whole(self, gathering: Gathering, packing: Packing | None) -> torch.Tensor | None:
        """Whole rows of a micro-batch, on the rank that reports."""
        parts = gathering.wait()
        if not parts:
            return None
        hidden_TBD = join_context(
            torch.cat(parts) if len(parts) > 1 else parts[0], self._groups, packing
        )
        if hidden_TBD is None:
            return None
        return packing.unpack(hidden_TBD) if packing else hidden_TBD.transpose(0, 1)

    def _put_together(self) -> list[torch.Tensor]:
        passes = self._passes
        self._passes = []
        if self._pick is not None:
            for one in passes:
                self._take(one)
            return []
        found = (self._whole(*one) for one in passes)
        return [rows for rows in found if rows is not None]

    @property
    def hidden_BTD(self) -> torch.Tensor:
        """Detached states of all micro-batches inside the context, in their order, one row for each
        sequence; zeros fill short ones.

        A packed micro-batch has as many tokens as its longest sequence. In the actor's dtype and on
        its device.

        Raises:
            DataError: no forward pass happened inside, or this rank does not report.
        """
        if not self._rows:
            raise DataError(
                "No final hidden states were gathered on this rank.",
                given=(
                    f"last stage: {bool(self._model.post_process)}, leads its groups:"
                    f" {self._groups.leads}"
                ),
                expected="a rank that reports, and at least one forward pass inside the context",
                do="Check the actor's `reports` first, and put the context around the forward "
                "call.",
            )
        longest = max(row.shape[1] for row in self._rows)
        return torch.cat([F.pad(row, (0, 0, 0, longest - row.shape[1])) for row in self._rows])


def groups_of(model: GPTModel) -> Groups:
    """The groups that the model was built with; older versions of megatron-core keep them globally
    only.
    """
    collection = getattr(model, "pg_collection", None)
    if collection is not None:
        return Groups(collection.tp, collection.cp, collection.pp)
    return Groups(
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )


def _unwrap(model: nn.Module) -> Any:
    """The GPTModel under DistributedDataParallel and similar wrappers. Raises ModelError if there
    is none.
    """
    inner: Any = model
    while not isinstance(inner, GPTModel) and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    if not isinstance(inner, GPTModel):
        raise ModelError(
            "This is not a megatron-core language model.",
            given=type(inner).__name__,
            expected="a megatron-core language model (GPTModel)",
            do="Pass the model that the Megatron actor trains.",
        )
    return inner

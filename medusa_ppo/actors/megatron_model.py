"""One rank's part of a Llama-type actor as a GPTModel of megatron-core: built, filled from a
checkpoint, run, and joined again. Of a vision-language actor it is the language model, which takes
features of images in the place of embeddings.

Layers are those that megatron-core has without TransformerEngine: they run wherever torch runs. Two
are our own, because megatron-core's need TransformerEngine or store a score for every pair of
tokens: the norm (for sequence parallelism) and the attention, which is torch's. Shape letters: B
batch rows, T tokens, P tokens of one context-parallel rank, V vocabulary, D hidden, N heads, W
width of a head, M rows, I features of images, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from safetensors import safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint

from heads.errors import ModelError
from medusa_ppo.actors.megatron_layout import (
    LOGITS,
    OUTPUT,
    Cutter,
    Gathering,
    LlamaSizes,
    Top,
    context_positions,
    key_table,
    saved_name,
)
from medusa_ppo.actors.vision import ImageFeatures
from medusa_ppo.config.actor_section import ActorConfig
from medusa_ppo.config.ppo_section import ATTENTION
from medusa_ppo.runtime.rendezvous import Meeting

QUERY_BLOCK = 512
"""Queries that attend at a time with context parallelism: their mask is this times all tokens."""
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
SEEN = "seen"
Inputs = Mapping[str, Any]
"""A micro-batch as `forward` of a GPTModel takes it: input_ids, position_ids, attention_mask; and
under `SEEN` the images that belong to it, if it has any.
"""
OnOutput = Callable[[int, torch.Tensor], torch.Tensor | None]
"""What the last stage does with a micro-batch's logits `BTV` (this rank's columns), or the scores
`BT1` of a model with one output: returns a loss for the backward pass, or None.
"""


def start_parallel(meeting: Meeting, section: ActorConfig) -> None:
    """Meet the other ranks and form Megatron's groups, which are torch's global ones; the remaining
    factor of the ranks is data parallel.
    """
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    place = meeting.place
    # Megatron supports nothing else: its groups are made from torch's global one.
    dist.init_process_group(
        backend, store=meeting.store, rank=place.rank, world_size=place.size, timeout=place.timeout
    )
    parallel_state.initialize_model_parallel(
        section.tensor_parallel,
        section.pipeline_parallel,
        context_parallel_size=section.context_parallel,
    )
    # With sequence parallelism Megatron enters a random state of its own around each pass, also
    # without dropout, and refuses one that nobody has added. Nothing here draws from it.
    model_parallel_cuda_manual_seed(0)


def host_group(timeout_s: float) -> dist.ProcessGroup:
    """A new group of this replica's ranks, for tensors on the host. Nobody else communicates in it,
    so that a thread may, whatever the rank's other threads do.
    """
    own = tuple(dist.get_process_group_ranks(parallel_state.get_model_parallel_group()))
    replicas: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, own)
    # Every rank has to take part in forming every group, in the same order: torch names groups that
    # only their members form by how many groups a rank has, which pipeline stages differ in.
    groups = {
        ranks: dist.new_group(ranks, timedelta(seconds=timeout_s), backend="gloo")
        for ranks in sorted(set(replicas))
    }
    return groups[own]


def stop_parallel() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class RankModel:
    """This rank's part of one model. `start_parallel` comes first.

    Attributes:
        sizes: sizes of the whole model.
        model: the GPTModel.
        ddp: Megatron's wrapper around it, with the buffers of its gradients; None: not trained.
        replica, replicas: which data-parallel replica this rank belongs to, and how many there are.
        first: this rank belongs to the first replica and has the first part of each sequence, so it
            exports what all replicas share.
    """

    def __init__(
        self,
        sizes: LlamaSizes,
        path: str | Path,
        section: ActorConfig,
        *,
        trained: bool,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        recompute: bool | str = False,
        top: Top = LOGITS,
    ) -> None:
        """
        Args:
            path: folder of the checkpoint to fill it from, or one safetensors file.
            section: how it is sharded; the same on all ranks.
            trained: whether it needs gradients.
            device: its device.
            dtype: dtype of its weights and products.
            recompute: as ppo.recompute.
            top: what it has after its last norm.

        Raises:
            ConfigError: the model can't be split over that many ranks.
            ModelError: the checkpoint lacks a tensor, or has one with the wrong shape.
        """
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._context = parallel_state.get_context_parallel_group()
        self.sizes = sizes
        self.device = device
        self.replica = parallel_state.get_data_parallel_rank()
        self.replicas = parallel_state.get_data_parallel_world_size()
        self.first = self.replica == 0 and dist.get_rank(self._context) == 0
        self.top = top
        self._table = key_table(sizes, top)
        self._cutter = Cutter(sizes, dist.get_rank(self._group), section.tensor_parallel)
        sizes.check_cut(section.tensor_parallel, section.pipeline_parallel)
        self._first_layer = (
            sizes.layers
            // section.pipeline_parallel
            * parallel_state.get_pipeline_model_parallel_rank()
        )
        # A sequence's tokens are split into equal parts: two for each context-parallel rank, and
        # for sequence parallelism each part again.
        self._multiple = section.tensor_parallel if section.sequence_parallel else 1
        self._multiple *= 2 * section.context_parallel if section.context_parallel > 1 else 1
        model = _build(
            sizes, _settings(sizes, section, dtype, recompute if trained else False), section, top
        )
        # Dropout is 0: train mode only lets Megatron recompute.
        self.model = model.to(device).requires_grad_(trained).train(trained)
        for name, parameter in self.parameters().items():
            # Marks which rank counts it in the norm; Megatron sets this during initialisation,
            # which we skip.
            parameter.tensor_model_parallel = self._table[name].how != "whole"
        self.begin(path)
        shared = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=section.distributed_optimizer
        )
        self.ddp = (
            DistributedDataParallel(self.model.config, shared, self.model) if trained else None
        )

    def parameters(self) -> dict[str, Any]:
        """This rank's parameters by their names in the whole model."""
        return {
            self._whole_name(name): parameter for name, parameter in self.model.named_parameters()
        }

    # ---- checkpoints

    def begin(self, path: str | Path) -> None:
        """Fill the parameters from the checkpoint that the model starts from."""
        parameters = self.parameters()
        for name, shard in self.first_shards(path):
            with torch.no_grad():
                parameters[name].copy_(shard)

    def load(self, path: str | Path) -> None:
        """Fill the parameters from what a run has saved."""
        parameters = self.parameters()
        for name, shard in self.read_saved(path):
            with torch.no_grad():
                parameters[name].copy_(shard)

    def read_saved(self, path: str | Path, suffix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards of all parameters, from what a run has saved."""
        body = saved_name(self.top.body, self.sizes, self.top)
        yield from self.read_shards(path, list(self.parameters()), suffix, body)

    def first_shards(self, path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards of the checkpoint that the model starts from, which may lack its last
        layer.
        """
        body = self.top.from_body
        names = [
            name for name in self.parameters() if not body or not name.startswith(f"{OUTPUT}.")
        ]
        yield from self.read_shards(path, names, body=body)

    def read_shards(
        self, path: str | Path, names: list[str], suffix: str = "", body: str = ""
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards of the given parameters; only their bytes are read.

        Args:
            suffix: follows the checkpoint's names in the file.
            body: prefix of the body's names in the file; empty: as in `Top`.
        """
        folder = Path(path)
        # A state file of a run is one file, a checkpoint a folder of shards.
        files = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors")) or [folder]]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name in names:
            entry = self._table[name]
            pieces = []
            for index, (named, shape) in enumerate(zip(entry.sources, entry.shapes, strict=True)):
                source = named
                if body and named.startswith(self.top.body):
                    source = body + named.removeprefix(self.top.body)
                held = (
                    where[source + suffix].get_slice(source + suffix)
                    if source + suffix in where
                    else None
                )
                if held is None or tuple(held.get_shape()) != shape:
                    given = "no such tensor" if held is None else tuple(held.get_shape())
                    raise ModelError(
                        "The checkpoint does not fit its configuration.",
                        given=f"{path}: {source}{suffix}: {given}",
                        expected=f"shape {shape}",
                        do="Save the whole causal LM with save_pretrained.",
                    )
                pieces.append(held[self._cutter.own_slice(entry, index) or slice(None)])
            yield name, self._cutter.merge(entry, pieces)

    def whole_tensors(
        self, value: Callable[[nn.Parameter], torch.Tensor], dtype: torch.dtype, bucket_bytes: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        """The checkpoint's tensors that this stage's shards make up, on the CPU, some at a time;
        nothing on ranks that export nothing.

        All tensor-parallel ranks of the first replica must call it, and all others that `value`
        needs. A bucket of shards (as many as fit into `bucket_bytes`, but at least one) is sent in
        one gather.

        Args:
            value: returns what to export for a parameter, in the parameter's shape.
        """
        parameters = self.given_out()
        for bucket in _buckets(parameters, dtype, bucket_bytes):
            values = [value(parameters[name]).detach().reshape(-1).to(dtype) for name in bucket]
            # This rank has done its part in `value`.
            if not self.first:
                continue
            parts = Gathering(torch.cat(values), self._group).wait()
            if not parts:
                continue
            pieces = [
                part.cpu().split([parameters[name].numel() for name in bucket]) for part in parts
            ]
            joined: dict[str, torch.Tensor] = {}
            for index, name in enumerate(bucket):
                own = [piece[index].view(parameters[name].shape) for piece in pieces]
                joined |= self._cutter.join(self._table[name], own)
            yield {name: tensor.contiguous() for name, tensor in joined.items()}

    def given_out(self) -> dict[str, Any]:
        """The parameters of this stage that the checkpoint has; without the last stage's copy of a
        tied embedding.
        """
        return {
            name: parameter
            for name, parameter in self.parameters().items()
            if not getattr(parameter, "shared", False)
        }

    def _whole_name(self, name: str) -> str:
        return LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + self._first_layer}.", name)

    # ---- passes

    def columns(self, width: int) -> torch.Tensor:
        """Which of a micro-batch's tokens this rank holds, in its own order (P); those from `width`
        on are padding.
        """
        padded = -(-width // self._multiple) * self._multiple
        return context_positions(
            dist.get_rank(self._context), dist.get_world_size(self._context), padded
        ).to(self.device)

    def inputs(self, input_ids_BT: torch.Tensor, seen: ImageFeatures | None = None) -> Inputs:
        """This rank's part of a micro-batch, padded on the right, as a GPTModel takes it: positions
        (plain without images), and no mask, since `CausalAttention` knows which tokens a token
        sees.
        """
        (rows, width), columns_P = input_ids_BT.shape, self.columns(input_ids_BT.shape[1])
        padded_BT = F.pad(input_ids_BT, (0, max(0, int(columns_P.max()) + 1 - width), 0, 0))
        positions = columns_P.expand(rows, -1)
        if self.sizes.mrope_section:
            # In time, height and width; without images all three are the same.
            positions = columns_P.expand(3, rows, -1)
            if seen is not None:
                positions = seen.positions(padded_BT).to(self.device)
        return {
            "input_ids": padded_BT[:, columns_P],
            "position_ids": positions.contiguous(),
            "attention_mask": None,
            SEEN: seen,
        }

    def _embedded(self, given: Inputs, seen: ImageFeatures) -> torch.Tensor:
        """The first stage's input: embeddings of this rank's tokens (T, B, D; with sequence
        parallelism its part of T), and features where images are.
        """
        embedded_TBD = self.model.embedding(given["input_ids"], given["position_ids"])
        row_I, column_I = seen.placed_BT.nonzero(as_tuple=True)
        features_ID = torch.cat([part.rows_NX for part in seen.features]).to(embedded_TBD)
        if self.model.config.sequence_parallel:
            held = embedded_TBD.shape[0]
            column_I = column_I - held * dist.get_rank(self._group)
            own_I = (column_I >= 0) & (column_I < held)
            row_I, column_I, features_ID = row_I[own_I], column_I[own_I], features_ID[own_I]
        # Not in place: the embeddings that they replace get no gradient.
        return embedded_TBD.index_put((column_I, row_I), features_ID)

    def of_all_columns(
        self, values_P: torch.Tensor, places_P: torch.Tensor, total: int
    ) -> torch.Tensor:
        """Combine numbers that each context-parallel rank has for its own rows, on all of them: M.
        Gradients go back to a rank's own rows.
        """
        if dist.get_world_size(self._context) == 1:
            return values_P
        return _AllRows.apply(values_P, places_P, total, self._context)

    def run(self, micros: list[Inputs], on_output: OnOutput, *, backward: bool = False) -> None:
        """All micro-batches through the pipeline; `on_output` is called on the last stage, for one
        after the other.
        """
        # Megatron's schedules can't run zero micro-batches; every rank of a replica has equally
        # many.
        if not micros:
            return

        def forward_step(
            numbers: Iterator[int], model: Any
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            number = next(numbers)
            given = dict(micros[number])
            seen = given.pop(SEEN, None)
            if seen is not None and self.model.pre_process:
                given["decoder_input"] = self._embedded(given, seen)

            def finish(logits_BTV: torch.Tensor, non_loss_data: bool = False) -> Any:
                loss = on_output(number, logits_BTV)
                # Three values: with calculate_per_token_loss Megatron takes the loss unchanged.
                return (
                    None if loss is None else (loss, torch.ones_like(loss, dtype=torch.int), None)
                )

            return model(**given), finish

        rows, width = micros[0]["input_ids"].shape
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(range(len(micros))),
            model=[self.ddp or self.model],
            num_microbatches=len(micros),
            # Megatron divides it by the context-parallel ranks itself.
            seq_length=width * dist.get_world_size(self._context),
            micro_batch_size=rows,
            forward_only=not backward,
            # In a pass without gradients `on_output` returns no loss, which Megatron would
            # otherwise require.
            collect_non_loss_data=not backward,
        )

    def clear_gradients(self) -> None:
        assert self.ddp is not None, "only trained models have gradients"
        for parameter in self.model.parameters():
            # It may be the buffer itself, which the wrapper fills, so backward would add to it
            # twice.
            parameter.grad = None
        self.ddp.zero_grad_buffer()

    def gather_gradients(self) -> None:
        """Sum the gradients over replicas and shared copies; with a distributed optimizer, this
        replica then has those of its part.
        """
        finalize_model_grads([self.ddp])


def _buckets(
    shards: Mapping[str, nn.Parameter], dtype: torch.dtype, bucket_bytes: int
) -> Iterator[list[str]]:
    bucket: list[str] = []
    filled = 0
    for name, shard in shards.items():
        size = shard.numel() * dtype.itemsize
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket = []
            filled = 0
        bucket.append(name)
        filled += size
    if bucket:
        yield bucket


def _settings(
    sizes: LlamaSizes, section: ActorConfig, dtype: torch.dtype, recompute: bool | str
) -> TransformerConfig:
    again: dict[str, Any] = {}
    if recompute:
        # Replaces the attention's core among Megatron's modules.
        again = {"recompute_granularity": "selective"}
        if recompute != ATTENTION:
            again = {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.groups,
        kv_channels=sizes.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=sizes.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=sizes.qkv_bias,
        qk_layernorm=sizes.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # The checkpoint's numbers follow; otherwise Megatron would first initialise whole tensors
        # on every rank.
        use_cpu_initialization=True,
        perform_initialization=False,
        # Fused kernels need CUDA, Apex or TransformerEngine.
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=section.tensor_parallel,
        pipeline_model_parallel_size=section.pipeline_parallel,
        context_parallel_size=section.context_parallel,
        sequence_parallel=section.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches have different widths: stages tell each other the shape first.
        variable_seq_lengths=section.pipeline_parallel > 1,
        # Not used; the default refuses sequences of several lengths.
        moe_token_dispatcher_type="alltoall",
        # Losses are already divided by the tokens of the whole minibatch: sums, never means of
        # means.
        calculate_per_token_loss=True,
        mrope_section=list(sizes.mrope_section) or None,
        **again,
    )


def _build(
    sizes: LlamaSizes, settings: TransformerConfig, section: ActorConfig, top: Top
) -> GPTModel:
    layer = get_gpt_layer_local_spec(qk_layernorm=sizes.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SharedNorm
    attention = layer.submodules.self_attention.submodules
    if sizes.qk_norm:
        attention.q_layernorm = attention.k_layernorm = SharedNorm
    attention.core_attention = CausalAttention
    model = GPTModel(
        settings,
        TransformerBlockSubmodules(
            [layer] * (sizes.layers // section.pipeline_parallel), SharedNorm
        ),
        vocab_size=sizes.vocab_rows(section.tensor_parallel) * section.tensor_parallel,
        max_sequence_length=sizes.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="mrope" if sizes.mrope_section else "rope",
        rotary_base=sizes.rope_theta,
        rope_scaling=bool(sizes.rope_factor),
        rope_scaling_factor=sizes.rope_factor or 1.0,
        share_embeddings_and_output_weights=sizes.tied and not top.layer,
    )
    if top.layer and model.post_process:
        model.output_layer = OneOutput(settings, top.bias)
    return model


class OneOutput(nn.Module):
    """A layer with one output per token instead of the table that gives logits. It is replicated on
    all tensor-parallel ranks, float32 in a model of any dtype, like a critic's in one process, and
    starts at zero.
    """

    def __init__(self, config: TransformerConfig, bias: bool) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(1)) if bias else None
        for parameter in self.parameters():
            # Each rank has the gradients of its own tokens, and Megatron adds them up.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Scores of all tokens (T, B, 1), in float32; `input_` has this rank's."""
        scores_TB1 = F.linear(input_.float(), self.weight, self.bias)
        if self.sequence_parallel:
            # All ranks compute the same from them, so each takes only the gradient of its own
            # tokens.
            scores_TB1 = gather_from_sequence_parallel_region(
                scores_TB1, tensor_parallel_output_grad=False
            )
        return scores_TB1, None


class SharedNorm(nn.RMSNorm):
    """A norm replicated on all tensor-parallel ranks. With sequence parallelism each sees some
    tokens, and Megatron adds the gradients up.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(nn.Module):
    """Causal attention of this rank's queries, by torch's own kernels: memory grows linearly with
    the tokens, on a GPU and on a CPU. Megatron's own without TransformerEngine keeps several scores
    for every pair of tokens.

    With context parallelism it uses the gathered keys and values of all ranks. torch's kernels know
    no causal attention of some queries to all keys before them, so they get a mask. It covers
    `QUERY_BLOCK` queries at a time, and is made again in the backward pass.
    """

    def __init__(self, config: TransformerConfig, **named: Any) -> None:
        super().__init__()
        self._group = named["pg_collection"].cp

    def forward(self, query_PBNW: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        ranks = dist.get_world_size(self._group)
        if ranks > 1:
            total = ranks * query_PBNW.shape[0]
            places = [context_positions(rank, ranks, total) for rank in range(ranks)]
            # The gathered tokens are in the order of ranks, not of the sequence.
            order_T = torch.cat(places).argsort().to(query_PBNW.device)
            key, value = (_AllTokens.apply(part, self._group)[order_T] for part in (key, value))
        repeats = query_PBNW.shape[2] // key.shape[2]
        keys, values = (
            # A query group shares one key and value; not every torch kernel supports groups.
            part.repeat_interleave(repeats, dim=2).permute(1, 2, 0, 3)
            for part in (key, value)
        )
        queries_BNPW = query_PBNW.permute(1, 2, 0, 3)
        if ranks > 1:
            positions_P = places[dist.get_rank(self._group)].tolist()
            out_BNPW = _attend_in_blocks(queries_BNPW, keys, values, positions_P)
        else:
            out_BNPW = F.scaled_dot_product_attention(queries_BNPW, keys, values, is_causal=True)
        return out_BNPW.permute(2, 0, 1, 3).flatten(2)


def _attend_in_blocks(
    queries_BNPW: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions_P: list[int]
) -> torch.Tensor:
    """Causal attention of queries at these positions, the two consecutive pieces of a rank, to the
    keys and values `BNTW` of all positions.
    """
    piece = len(positions_P) // 2
    found = []
    for start in range(0, len(positions_P), piece):
        for first in range(start, start + piece, QUERY_BLOCK):
            rows = slice(first, min(first + QUERY_BLOCK, start + piece))
            seen = positions_P[rows.stop - 1] + 1
            found.append(
                checkpoint(
                    _attend_to_the_past,
                    queries_BNPW[:, :, rows],
                    keys[:, :, :seen],
                    values[:, :, :seen],
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
    return torch.cat(found, dim=2)


def _attend_to_the_past(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention of the last positions' queries; the last one sees all keys."""
    count = queries.shape[2]
    seen = keys.shape[2]
    mask = torch.ones(count, seen, dtype=torch.bool, device=queries.device).tril(seen - count)
    return F.scaled_dot_product_attention(queries, keys, values, mask)


class _AllTokens(torch.autograd.Function):
    """Concatenate the rows of all ranks. In the backward pass each rank gets the sum of all
    gradients for its own rows.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [
            torch.empty_like(values, memory_format=torch.contiguous_format)
            for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, values.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        own = torch.empty_like(
            grad.chunk(dist.get_world_size(ctx.group))[0], memory_format=torch.contiguous_format
        )
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


class _AllRows(torch.autograd.Function):
    """As `RankModel.of_all_columns`."""

    @staticmethod
    def forward(
        ctx: Any,
        values_P: torch.Tensor,
        places_P: torch.Tensor,
        total: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(places_P)
        whole_M = values_P.new_zeros(total)
        whole_M[places_P] = values_P
        dist.all_reduce(whole_M, group=group)
        return whole_M

    @staticmethod
    def backward(ctx: Any, grad_M: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places_P,) = ctx.saved_tensors
        return grad_M[places_P], None, None, None

"""One rank's part of a Llama-type actor as a GPTModel of megatron-core: built, filled from a checkpoint, run, and joined again.

Layers are those that megatron-core has without TransformerEngine: they run wherever torch runs.
Shape letters: B batch rows, T tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from safetensors import safe_open

from heads.errors import ModelError
from medusa_ppo.actors.megatron_layout import Cutter, Gathering, LlamaSizes, key_table
from medusa_ppo.meeting import Meeting

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
Inputs = Mapping[str, torch.Tensor]
"""A micro-batch as `forward` of a GPTModel takes it: input_ids, position_ids, attention_mask."""
OnOutput = Callable[[int, torch.Tensor], torch.Tensor | None]
"""What the last stage does with a micro-batch's logits `BTV` (this rank's columns): a loss to go back from, or None."""


def start_parallel(meeting: Meeting, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Meet the other ranks and form Megatron's groups, which are torch's global ones; what is left of the ranks is data parallel."""
    backend, place = "nccl" if torch.cuda.is_available() else "gloo", meeting.place
    dist.init_process_group(backend, store=meeting.store, rank=place.rank, world_size=place.size, timeout=place.timeout)
    parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel)


def stop_parallel() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class RankModel:
    """This rank's part of one model. `start_parallel` comes first.

    Attributes:
        sizes: of the whole model.
        model: the GPTModel.
        replica, replicas: which data-parallel replica this rank belongs to, and how many there are.
        gives_out: this rank joins its stage's tensors; the first tensor-parallel rank of the first replica.
    """

    def __init__(self, sizes: LlamaSizes, path: str | Path, *, trained: bool, device: torch.device) -> None:
        """
        Args:
            path: folder of the checkpoint to fill it from, or one safetensors file.
            trained: gradients are wanted.
            device: where it lives.

        Raises:
            ConfigError: the model can't be cut over so many ranks.
            ModelError: the checkpoint lacks a tensor, or has one of another shape.
        """
        tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.sizes, self.device = sizes, device
        self.replica, self.replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.gives_out = self.replica == 0 and dist.get_rank(tensor_group) == 0
        self._group, self._table = tensor_group, key_table(sizes)
        self._cutter = Cutter(sizes, dist.get_rank(tensor_group), dist.get_world_size(tensor_group))
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        sizes.check_cut(self._cutter.ranks, stages)
        self._first_layer = sizes.layers // stages * parallel_state.get_pipeline_model_parallel_rank()
        self.model = _build(sizes, self._cutter.ranks, stages).to(device).requires_grad_(trained)
        self.load(path)
        self._ddp = DistributedDataParallel(self.model.config, DistributedDataParallelConfig(), self.model) if trained else None

    def parameters(self) -> dict[str, Any]:
        """This rank's parameters by their names in the whole model."""
        return {self._whole_name(name): parameter for name, parameter in self.model.named_parameters()}

    # ---- checkpoints ----------------------------------------------------------------------------------------------------------

    def load(self, path: str | Path) -> None:
        """Fill the parameters from a folder with safetensors, or from one such file."""
        parameters = self.parameters()
        for name, shard in self.read_shards(path, list(parameters)):
            with torch.no_grad():
                parameters[name].copy_(shard)

    def read_shards(self, path: str | Path, names: list[str], suffix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards of the given parameters; only their bytes are read.

        Args:
            suffix: follows the checkpoint's names in the file.
        """
        folder = Path(path)
        files = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors")) or [folder]]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name in names:
            entry = self._table[name]
            pieces = []
            for index, (source, shape) in enumerate(zip(entry.sources, entry.shapes, strict=True)):
                held = where[source + suffix].get_slice(source + suffix) if source + suffix in where else None
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

    def whole_tensors(self, shards: Mapping[str, torch.Tensor], dtype: torch.dtype, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        """The checkpoint's tensors that this stage's shards make up, on the CPU, some at a time; nothing on ranks that don't give out.

        All tensor-parallel ranks of the first replica call it with the same names. A bucket of shards, as many as fit into `bucket_bytes`
        and one at least, crosses in one gather.
        """
        for bucket in _buckets(shards, dtype, bucket_bytes):
            flat = torch.cat([shards[name].detach().reshape(-1).to(dtype) for name in bucket])
            parts = Gathering(flat, self._group).wait()
            if not parts:
                continue
            pieces = [part.cpu().split([shards[name].numel() for name in bucket]) for part in parts]
            joined: dict[str, torch.Tensor] = {}
            for index, name in enumerate(bucket):
                own = [piece[index].view(shards[name].shape) for piece in pieces]
                joined |= self._cutter.join(self._table[name], own)
            yield {name: tensor.contiguous() for name, tensor in joined.items()}

    def given_out(self) -> dict[str, Any]:
        """The parameters of this stage that the checkpoint has; not the last stage's copy of a tied embedding."""
        return {name: parameter for name, parameter in self.parameters().items() if not getattr(parameter, "shared", False)}

    def _whole_name(self, name: str) -> str:
        return LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + self._first_layer}.", name)

    # ---- passes ---------------------------------------------------------------------------------------------------------------

    def run(self, micros: list[Inputs], on_output: OnOutput, *, backward: bool = False) -> None:
        """All micro-batches through the pipeline; `on_output` is called on the last stage, for one after the other."""
        if not micros:
            return

        def forward_step(numbers: Iterator[int], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            number = next(numbers)

            def finish(logits_BTV: torch.Tensor, non_loss_data: bool = False) -> Any:
                loss = on_output(number, logits_BTV)
                # Three values: with calculate_per_token_loss Megatron takes the loss as it is.
                return None if loss is None else (loss, torch.ones_like(loss, dtype=torch.int), None)

            return model(**micros[number]), finish

        rows, width = micros[0]["input_ids"].shape
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(range(len(micros))),
            model=[self._ddp or self.model],
            num_microbatches=len(micros),
            seq_length=width,
            micro_batch_size=rows,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )

    def clear_gradients(self) -> None:
        assert self._ddp is not None, "only trained models have gradients"
        for parameter in self.model.parameters():
            parameter.grad = None  # It is the buffer itself, which the wrapper fills: backward would add to it twice.
        self._ddp.zero_grad_buffer()

    def gather_gradients(self) -> float:
        """Sum the gradients over replicas and shared copies, put them in their places, and return their norm over the whole model."""
        finalize_model_grads([self._ddp])
        squares = torch.zeros((), device=self.device)
        for name, parameter in self.parameters().items():
            parameter.grad = parameter.main_grad
            if self._counts(name, parameter):
                squares += parameter.main_grad.float().square().sum()
        dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        return float(squares.sqrt())

    def _counts(self, name: str, parameter: torch.nn.Parameter) -> bool:
        """This rank is the one that counts a parameter which several ranks have."""
        cut = self._table[name].how != "whole"
        return (cut or self._cutter.rank == 0) and not getattr(parameter, "shared", False)


def causal_inputs(input_ids_BT: torch.Tensor) -> Inputs:
    """A micro-batch, padded on the right, as a GPTModel takes it: plain positions, a causal mask."""
    rows, width = input_ids_BT.shape
    positions_BT = torch.arange(width, device=input_ids_BT.device).expand(rows, width).contiguous()
    hidden = torch.triu(torch.ones(1, 1, width, width, dtype=torch.bool, device=input_ids_BT.device), diagonal=1)
    return {"input_ids": input_ids_BT, "position_ids": positions_BT, "attention_mask": hidden}


def _buckets(shards: Mapping[str, torch.Tensor], dtype: torch.dtype, bucket_bytes: int) -> Iterator[list[str]]:
    bucket: list[str] = []
    filled = 0
    for name, shard in shards.items():
        size = shard.numel() * dtype.itemsize
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += size
    if bucket:
        yield bucket


def _build(sizes: LlamaSizes, ranks: int, stages: int) -> GPTModel:
    config = TransformerConfig(
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
        # The checkpoint's numbers follow; Megatron would draw whole tensors on every rank first.
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=ranks,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=stages > 1,
        moe_token_dispatcher_type="alltoall",  # Not used; the default refuses sequences of several lengths.
        # Losses are divided by the tokens of the whole minibatch before they come here: sums, never means of means.
        calculate_per_token_loss=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=sizes.qk_norm, normalization="RMSNorm"),
        vocab_size=sizes.vocab_rows(ranks) * ranks,
        max_sequence_length=sizes.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=sizes.rope_theta,
        rope_scaling=bool(sizes.rope_factor),
        rope_scaling_factor=sizes.rope_factor or 1.0,
        share_embeddings_and_output_weights=sizes.tied,
    ).eval()

"""What megatron-core needs to run without CUDA, for tests only, and the weights of a transformers
Llama in its layout.

Not Megatron's own here, because its CPU forms can't: a norm for sequence parallelism (torch's is
refused there), and an attention for context parallelism and packed sequences (both need
TransformerEngine). What names CUDA and is answered here: devices called "cuda", the types
`torch.cuda.FloatTensor` and `torch.cuda.BFloat16Tensor` that its optimizers ask for, generators'
states around what is made again in the backward pass, and pinned memory of rotary positions. All
else is megatron-core as it is.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rotary_pos_embedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

V, PADDED_V, D, LAYERS, HEADS, GROUPS = 100, 128, 32, 2, 4, 2


class NoRandomness:
    """Dropout is 0 in these tests, so there is no state to keep apart. As Megatron's tracker on a
    GPU it knows only the names that were added: sequence parallelism asks for one even so.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def reset(self) -> None:
        self._names = set()

    def add(self, name: str, seed: int) -> None:
        self._names.add(name)

    def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Any:
        assert name in self._names, f"cuda rng state {name} is not added"
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        pass


class CudaOnCpu(TorchFunctionMode):
    """`device="cuda"` and `.cuda()`, which Megatron's pipeline schedules and tied tables say
    outright, mean the CPU; `.type()` says what its optimizers ask for.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


def patch_cuda() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = (
        _rotary_on_this_rank  # Megatron's pins memory on its way to the GPU.
    )
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.zeros(0)
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    megatron_random._CUDA_RNG_STATE_TRACKER = NoRandomness()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def _rotary_on_this_rank(embedding: torch.Tensor, seq_dim: int, group: Any) -> torch.Tensor:
    return embedding[
        pieces_of([0, embedding.shape[seq_dim]], dist.get_rank(group), dist.get_world_size(group))
    ]


class RMSNorm(nn.Module):
    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(values, values.shape[-1:], self.weight, self.eps)


class PlainAttention(nn.Module):
    """Causal attention over gathered keys and values; knows context-parallel pieces and packed
    sequences.
    """

    def __init__(self, config: TransformerConfig, **named: Any) -> None:
        super().__init__()
        self.groups = named["pg_collection"]

    def forward(
        self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> torch.Tensor:
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        ranks = dist.get_world_size(self.groups.cp)
        rank = dist.get_rank(self.groups.cp)
        edges = (
            packed_seq_params.cu_seqlens_q_padded.tolist()
            if packed
            else [0, ranks * query.shape[0]]
        )
        places = [pieces_of(edges, r, ranks) for r in range(ranks)]
        segment = torch.bucketize(torch.arange(edges[-1]), torch.tensor(edges[1:]), right=True)
        everyone = []
        for tensor in (key, value):
            parts = [torch.empty_like(tensor) for _ in range(ranks)]
            dist.all_gather(parts, tensor.contiguous(), group=self.groups.cp)
            everyone.append(
                torch.cat(parts)
                .repeat_interleave(query.shape[2] // key.shape[2], dim=2)
                .permute(1, 2, 0, 3)
            )
        mine = places[rank]
        theirs = torch.cat(places)
        allowed = (theirs <= mine[:, None]) & (segment[theirs] == segment[mine][:, None])
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3), *everyone, attn_mask=allowed
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def pieces_of(edges: list[int], rank: int, ranks: int) -> torch.Tensor:
    """Positions of a context-parallel rank's tokens: of each sequence in 2 x ranks pieces the
    rank-th and the rank-th from behind.
    """
    found = []
    for start, end in pairwise(edges):
        pieces = torch.arange(start, end).chunk(2 * ranks)
        found += [pieces[rank], pieces[-1 - rank]] if ranks > 1 else [torch.arange(start, end)]
    return torch.cat(found)


def llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=D,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            max_position_embeddings=64,
            rms_norm_eps=1e-6,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=0,
        )
    )
    for (
        parameter
    ) in model.parameters():  # Norms away from 1 and weights large enough that mistakes show.
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.float().eval()


def gpt(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    own_attention: bool = False,
    tied: bool = False,
) -> GPTModel:
    """This rank's part of a GPTModel of the Llama's sizes; the parallel state is set up anew."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp)
    megatron_random.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=D,
        ffn_hidden_size=48,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=D // HEADS,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        context_parallel_size=cp,
        sequence_parallel=sequence_parallel,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    if own_attention:
        layer.submodules.self_attention.submodules.core_attention = PlainAttention
    spec: Any = layer
    if sequence_parallel:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        spec = TransformerBlockSubmodules(layer_specs=[layer] * LAYERS, layer_norm=RMSNorm)
    return GPTModel(
        config,
        spec,
        vocab_size=PADDED_V,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )


def load_llama(model: GPTModel, source: LlamaForCausalLM) -> None:
    """Copy the Llama's weights into this rank's part."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()

    def cut(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(ranks, dim)[rank]

    def padded(table_VD: torch.Tensor) -> torch.Tensor:
        return cut(
            F.pad(table_VD, (0, 0, 0, PADDED_V - V), value=7.0), 0
        )  # Padding that shows when it is read.

    state = {}
    if model.pre_process:
        state["embedding.word_embeddings.weight"] = padded(source.model.embed_tokens.weight)
    for index, layer in enumerate(model.decoder.layers):
        old = source.model.layers[layer.layer_number - 1]
        new = f"decoder.layers.{index}."
        q, k, v = (
            getattr(old.self_attn, f"{name}_proj").weight.unflatten(0, (GROUPS, -1))
            for name in "qkv"
        )
        state[new + "self_attention.linear_qkv.weight"] = cut(
            torch.cat([q, k, v], dim=1).flatten(0, 1), 0
        )
        state[new + "self_attention.linear_proj.weight"] = cut(old.self_attn.o_proj.weight, 1)
        state[new + "mlp.linear_fc1.weight"] = torch.cat(
            [cut(old.mlp.gate_proj.weight, 0), cut(old.mlp.up_proj.weight, 0)]
        )
        state[new + "mlp.linear_fc2.weight"] = cut(old.mlp.down_proj.weight, 1)
        state[new + "input_layernorm.weight"] = old.input_layernorm.weight
        state[new + "pre_mlp_layernorm.weight"] = old.post_attention_layernorm.weight
    if model.post_process:
        state["decoder.final_layernorm.weight"] = source.model.norm.weight
        if not model.share_embeddings_and_output_weights:
            state["output_layer.weight"] = padded(source.lm_head.weight)
        elif not model.pre_process:
            model.shared_embedding_or_output_weight().data.copy_(padded(source.lm_head.weight))
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, tensor in state.items():
            own.pop(name).copy_(tensor)
    left = {name for name in own if "output_layer" not in name}
    assert not left, f"not loaded: {left}"

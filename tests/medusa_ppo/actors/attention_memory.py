"""Memory of one forward and backward pass of the Megatron actor over one sequence, without CUDA.

    python tests/medusa_ppo/actors/attention_memory.py TOKENS [--megatrons-own] [--recompute]

Prints a JSON line: the most bytes of tensors that were alive at once beside the model's
(`tensor_bytes`), the growth of the process's resident memory (`resident_bytes`), seconds, and with
`--compare` in the place of a single pass the largest difference of logits and of gradients between
our attention and Megatron's own, which needs a mask of tokens by tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import tests.medusa_ppo.actors.cpu_megatron as cpu_megatron

cpu_megatron.patch_cuda()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from medusa_ppo.actors import megatron_model  # noqa: E402
from medusa_ppo.actors.megatron_layout import LlamaSizes  # noqa: E402
from medusa_ppo.config.actor_section import ActorConfig  # noqa: E402
from tests.medusa_ppo.ppo.test_recompute import LiveBytes  # noqa: E402

OURS = megatron_model.CausalAttention
VOCAB = 64


def llama_folder(folder: Path, longest: int) -> Path:
    """A tiny Llama with query groups, as a checkpoint."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def build(folder: Path, attention: type, recompute: bool | str) -> megatron_model.RankModel:
    """With one attention or the other."""
    megatron_model.CausalAttention = attention  # type: ignore[misc,assignment]
    return megatron_model.RankModel(
        LlamaSizes.read(folder),
        folder,
        ActorConfig(backend="megatron"),
        trained=True,
        device=torch.device("cpu"),
        recompute=recompute,
    )


def one_pass(model: megatron_model.RankModel, tokens: int, mask: bool) -> dict[str, Any]:
    """Logits and gradients by parameter."""
    ids_BT = torch.randint(0, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))
    inputs: dict[str, Any] = dict(model.inputs(ids_BT))
    if mask:
        inputs["attention_mask"] = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)
    found: dict[str, Any] = {}

    def loss(_: int, logits_BTV: torch.Tensor) -> torch.Tensor:
        found["logits"] = logits_BTV.detach()
        return logits_BTV.log_softmax(-1)[..., 0].mean()

    model.clear_gradients()
    model.run([inputs], loss, backward=True)
    found |= {name: parameter.main_grad for name, parameter in model.parameters().items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tokens", type=int)
    parser.add_argument("--megatrons-own", action="store_true")
    parser.add_argument("--recompute", choices=("layers", "attention"))
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    recompute = {None: False, "layers": True}.get(options.recompute, options.recompute)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as name, cpu_megatron.CudaOnCpu():
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(0)
        folder = llama_folder(Path(name) / "model", options.tokens)
        found: dict[str, Any]
        if options.compare:
            ours = one_pass(build(folder, OURS, recompute), options.tokens, False)
            theirs = one_pass(build(folder, DotProductAttention, recompute), options.tokens, True)
            far = {part: float((ours[part] - theirs[part]).abs().max()) for part in ours}
            logits = far.pop("logits")
            least = min(float(gradient.abs().max()) for gradient in theirs.values())
            found = {"logits": logits, "gradients": max(far.values()), "least": least}
        else:
            attention = DotProductAttention if options.megatrons_own else OURS
            model = build(folder, attention, recompute)
            one_pass(model, 64, options.megatrons_own)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            began = time.perf_counter()
            with LiveBytes(torch.nn.Module()) as live:
                one_pass(model, options.tokens, options.megatrons_own)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            found = {
                "tensor_bytes": live.peak,
                "resident_bytes": 1024 * grown,
                "seconds": round(time.perf_counter() - began, 1),
            }
        megatron_model.stop_parallel()
    print(json.dumps(found))


if __name__ == "__main__":
    main()

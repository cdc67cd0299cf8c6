"""Trains the small actor of the embedded example, and grows it by zero-gated neurons; an
interrupted training is resumed.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from medusa_ppo.demo.task import document, problem

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 20.0
"""Seconds between two saves of an unfinished training."""

MOMENTUM = 0.95
"""Share of its past in Muon's running mean of gradients."""
ORTHOGONAL_STEPS, ORTHOGONAL_POLYNOMIAL = 5, (3.4445, -4.7750, 2.0315)
"""Newton-Schulz steps, and a, b and c of the polynomial a x + b x^3 + c x^5 that each of them
applies to all singular values; both are those of torch.optim.Muon.
"""

_LOSS_WINDOW = 20
"""The reported loss is the mean over this many batches."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the resulting actor (apart from rounding, which differs with the
    number of threads and the dtype of products).

    Attributes:
        seed: seed of the weights and of the text.
        steps: optimizer steps.
        batch_size: documents per step. Small on purpose: copying is learned in a number of steps,
            not of tokens.
        learning_rate: largest step size of AdamW, after `warmup_steps`; a cosine brings it down to
            zero.
        attention_learning_rate: the same for the matrices of attention, which Muon trains. With
            AdamW for them, too, the same loss takes twice as many steps.
        slip_rate: share of the solutions that answer with the second-to-last result, see task.py.
        checked_rate: share of the parts of steps that can be checked, see task.py.
        slips_from: share of the training that sees right solutions only. With slips from the start,
            the actor learns copying half as fast.
        init_range: standard deviation of the initial weights.
        grown_to: neurons in each feed-forward layer of the finished actor; those beyond
            `intermediate_size` are zero-gated (`grow`). 0: no growth.
    """

    seed: int = 0
    steps: int = 640
    batch_size: int = 6
    learning_rate: float = 2e-3
    attention_learning_rate: float = 0.02
    warmup_steps: int = 50
    slip_rate: float = 0.6
    checked_rate: float = 0.25
    slips_from: float = 0.6
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_layers: int = 3
    num_heads: int = 4
    init_range: float = 0.05
    max_positions: int = 1024
    grown_to: int = 0


DEFAULT_RECIPE = Recipe()
RECIPES = {
    "demo": DEFAULT_RECIPE,
    "demo-grown": replace(DEFAULT_RECIPE, grown_to=8192),
    "demo-grown-10m": replace(DEFAULT_RECIPE, grown_to=4096),
}
"""The embedded actors, by their names in `model.path`."""


@dataclass(frozen=True)
class PretrainStatus:
    """Progress of the training: steps done and in total, recent mean loss (nats per response
    token).
    """

    done: int
    total: int
    loss: float


PretrainProgress = Callable[[PretrainStatus], None]
"""Called after every step."""


def train_actor(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    progress: PretrainProgress | None = None,
    partial: Path | None = None,
    threads: int = 1,
    bfloat16: bool = False,
    device: str | torch.device = "cpu",
) -> LlamaForCausalLM:
    """The trained actor, in float32 on the CPU.

    Args:
        bfloat16: products are in bfloat16; weights and moments are float32 in any case.
        partial: file with an unfinished training; read if it exists, written every SAVE_EVERY_S,
            and left there at the end.
        threads: CPU threads; the previous number is restored.
    """
    model = _new_model(recipe, len(tokenizer), tokenizer.eos_token_id)
    device = torch.device(device)
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides torch's signature
    optimizers = _optimizers(model, recipe, torch.bfloat16 if bfloat16 else torch.float32)
    first = _load_partial(partial, model, optimizers) if partial is not None else 0
    losses: list[float] = []
    products = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
    with _threads(threads):
        saved = time.monotonic()
        for step, (ids_BT, loss_mask_BT) in enumerate(
            _batches(recipe, tokenizer, first), start=first
        ):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = optimizer.defaults["lr"] * _schedule(recipe, step)
            with products:
                loss = _loss(model, ids_BT.to(device), loss_mask_BT.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(loss.item())
            now = time.monotonic()
            if partial is not None and now - saved > SAVE_EVERY_S:
                _save_partial(partial, model, optimizers, step + 1)
                saved = now
            if progress is not None:
                recent = losses[-_LOSS_WINDOW:]
                progress(PretrainStatus(step + 1, recipe.steps, sum(recent) / len(recent)))
    return model.cpu().eval()


def _new_model(recipe: Recipe, vocab_size: int, end_id: int) -> LlamaForCausalLM:
    """A Llama with seeded weights; the caller's random state is not changed."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=recipe.max_positions,
        initializer_range=recipe.init_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=end_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config)


def _loss(
    model: LlamaForCausalLM, ids_BT: torch.Tensor, loss_mask_BT: torch.Tensor
) -> torch.Tensor:
    """Mean loss of the response tokens, in nats."""
    # lm_head is applied only to response rows, since nothing else has a loss.
    hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BTD[loss_mask_BT[:, 1:]])
    return F.cross_entropy(logits_NV, ids_BT[:, 1:][loss_mask_BT[:, 1:]])


class Muon(torch.optim.Optimizer):
    """Steps of equal size in all directions: the running mean of the gradients, with its singular
    values brought to about 1 (Muon, K. Jordan et al. 2024, github.com/KellerJordan/Muon). For
    square matrices of one size.

    torch.optim.Muon multiplies in bfloat16 always, and a CPU without units for it takes 5 to 45
    times as long for that. This one multiplies in any dtype, and all matrices at once.
    """

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], lr: float, dtype: torch.dtype
    ) -> None:
        super().__init__(matrices, {"lr": lr})
        self._dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # No closure: nothing here has one.
        """One step along the gradients of all matrices."""
        for group in self.param_groups:
            matrices = group["params"]
            ahead = []
            for matrix in matrices:
                if "mean" not in self.state[matrix]:
                    self.state[matrix]["mean"] = torch.zeros_like(matrix)
                mean = self.state[matrix]["mean"]
                mean.lerp_(matrix.grad, 1.0 - MOMENTUM)
                ahead.append(matrix.grad.lerp(mean, MOMENTUM))
            steps = orthogonal(torch.stack(ahead).to(self._dtype))
            for matrix, step in zip(matrices, steps, strict=True):
                matrix.add_(step, alpha=-group["lr"])


def orthogonal(matrices_NDD: torch.Tensor) -> torch.Tensor:
    """N matrices with the same singular vectors, and singular values of about 1 (0.7 to 1.2): five
    steps of Newton and Schulz, as in torch.optim.Muon.
    """
    a, b, c = ORTHOGONAL_POLYNOMIAL
    x_NDD = matrices_NDD / matrices_NDD.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ORTHOGONAL_STEPS):
        gram_NDD = x_NDD @ x_NDD.mT
        x_NDD = torch.baddbmm(
            x_NDD, torch.baddbmm(gram_NDD, gram_NDD, gram_NDD, beta=b, alpha=c), x_NDD, beta=a
        )
    return x_NDD


def _optimizers(
    model: LlamaForCausalLM, recipe: Recipe, products: torch.dtype
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of attention and AdamW for all others, at their largest step sizes."""
    attention = [weight for name, weight in model.named_parameters() if ".self_attn." in name]
    others = [weight for name, weight in model.named_parameters() if ".self_attn." not in name]
    adamw = torch.optim.AdamW(
        others, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    return adamw, Muon(attention, recipe.attention_learning_rate, products)


def _schedule(recipe: Recipe, step: int) -> float:
    """Share of the largest step size: linear warm-up, then a cosine to zero at the last step."""
    warm = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    return warm * 0.5 * (1.0 + math.cos(math.pi * step / recipe.steps))


_POOL = 8
"""Batches drawn at once, so that documents of similar length can share one."""


def _batches(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, first: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids_BT int64, loss_mask_BT bool: response token) from step `first` on; padding on the right
    is the end token.
    """
    size = recipe.batch_size
    end_id = tokenizer.eos_token_id
    for pool in range(first // _POOL, -(-recipe.steps // _POOL)):
        documents = _encode_pool(recipe, tokenizer, pool)
        order = list(range(_POOL))
        # Sorted documents in shuffled batches: little padding, and no progression from short to
        # long. Named seeds make a pool the same for a resumed training.
        random.Random(f"order/{recipe.seed}/{pool}").shuffle(order)
        for step, place in enumerate(order, start=pool * _POOL):
            if first <= step < recipe.steps:
                yield _pad(documents[place * size : (place + 1) * size], end_id)


def _encode_pool(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, pool: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids with the end token) of one pool, shortest first."""
    count = recipe.batch_size * _POOL
    # A pool has a single rate: the start of slips is rounded to whole pools, also on resume.
    slip_rate = recipe.slip_rate if pool * _POOL >= recipe.slips_from * recipe.steps else 0.0
    texts = [
        document(problem(pool * count + i, recipe.seed, "pretrain", slip_rate, recipe.checked_rate))
        for i in range(count)
    ]
    prompts = tokenizer([prompt for prompt, _ in texts], add_special_tokens=False)["input_ids"]
    responses = tokenizer([response for _, response in texts], add_special_tokens=False)[
        "input_ids"
    ]
    pairs = [
        (prompt, [*response, tokenizer.eos_token_id])
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))


def _pad(
    documents: list[tuple[list[int], list[int]]], end_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = [torch.tensor(prompt + response) for prompt, response in documents]
    written = [
        torch.tensor([False] * len(prompt) + [True] * len(response))
        for prompt, response in documents
    ]
    return pad_sequence(ids, batch_first=True, padding_value=end_id), pad_sequence(
        written, batch_first=True
    )


@torch.no_grad()
def grow(small: LlamaForCausalLM, intermediate: int) -> LlamaForCausalLM:
    """A model that computes the same function, in float32, with `intermediate` neurons in each
    feed-forward layer; the new ones are zero-gated.

    A CPU reads and multiplies zero-gated neurons like any others, so each token costs as much as in
    a large actor. The text stays as predictable as a trained small actor's, and no large actor has
    to be trained. Anything measured with such an actor must say so.
    """
    config = type(small.config)(**{**small.config.to_dict(), "intermediate_size": intermediate})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        large = LlamaForCausalLM(config).float()
    given = small.state_dict()
    for name, parameter in large.named_parameters():
        # Zero gates silence the new neurons. Zero outputs too: with either alone the other side
        # would get a gradient, and PPO would train the new neurons instead of the small actor.
        if name.endswith(("down_proj.weight", "gate_proj.weight")):
            parameter.zero_()
        parameter[tuple(slice(0, size) for size in given[name].shape)] = given[name]
    return large.eval()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use `count` CPU threads in the block, then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


KEPT_OF = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), Muon: ("mean",)}
"""What each optimizer keeps of a weight, by its names."""


def _kept(
    model: LlamaForCausalLM, optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, tuple[torch.nn.Parameter, torch.optim.Optimizer, str]]:
    """Where a saved tensor of an optimizer belongs: weight, optimizer, and its name there."""
    names = {weight: name for name, weight in model.named_parameters()}
    return {
        f"{kind}/{names[weight]}": (weight, optimizer, kind)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
        for kind in KEPT_OF[type(optimizer)]
    }


def _save_partial(
    path: Path,
    model: LlamaForCausalLM,
    optimizers: Iterable[torch.optim.Optimizer],
    steps_done: int,
) -> None:
    """Write weights and moments, so that what was trained so far survives an interruption."""
    tensors = {f"weight/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    tensors |= {
        name: optimizer.state[weight][kind]
        for name, (weight, optimizer, kind) in _kept(model, optimizers).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".writing")
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
        temporary,
        metadata={"steps_done": str(steps_done)},
    )
    # Replaced in one step, so that an interruption leaves the previous save.
    temporary.replace(path)


def _load_partial(
    path: Path, model: LlamaForCausalLM, optimizers: Iterable[torch.optim.Optimizer]
) -> int:
    """Steps already done; 0 (and the model unchanged) if there is no file or it does not fit."""
    if not path.is_file():
        return 0
    kept = _kept(model, optimizers)
    weights = {f"weight/{name}": weight for name, weight in model.named_parameters()}
    expected = weights | {name: weight for name, (weight, _, _) in kept.items()}
    try:
        with safe_open(path, framework="pt") as file:
            steps_done = int((file.metadata() or {})["steps_done"])
            tensors = {name: file.get_tensor(name) for name in expected}
    except (SafetensorError, KeyError, ValueError):
        return 0
    if any(tensors[name].shape != weight.shape for name, weight in expected.items()):
        return 0
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    for name, (weight, optimizer, kind) in kept.items():
        optimizer.state[weight][kind] = tensors[name].to(weight.device)
        if isinstance(optimizer, torch.optim.AdamW):
            steps = torch.tensor(float(steps_done), device=weight.device)
            optimizer.state[weight]["step"] = steps
    return steps_done

"""Step times on this machine's CPU, from a few seconds of microbenchmarks and without an engine:
the actor's matrix products, its samplers, our drafting call and verification, each timed by itself.

vLLM's own work on the host (scheduling, inputs, outputs) cannot be timed alone. `HOST` holds its
seconds as measured once on another machine; they are scaled by how long a fixed piece of Python
takes here compared with there.

Shape letters: B requests, N rows, T places of a cache, D hidden, V vocabulary, K drafts.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from heads.heads_config import COPY_WINDOW, HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.drafting.context import Arrived, ContextHeads, PairRing, Seen, Standing
from medusa_ppo.drafting.core import DraftingCore, DraftSampling
from medusa_ppo.drafting.noise import DRAFT_STREAM, uniforms
from medusa_ppo.drafting.products import PACK
from medusa_ppo.drafting.slots import DraftSlots, stamps
from medusa_ppo.drafting.texts import TextRing
from medusa_ppo.drafting.verify import DraftRows, Proposed, Rule, verify_rows
from medusa_ppo.predict.draft_work import layer_products
from medusa_ppo.runtime.hardware import ModelSizes, cores_wanted_s

Operation = tuple[str | int, ...]
"""A name, and the sizes that it is timed at."""
MOST_WEIGHTS = 1 << 30
"""Maximum bytes of weights to create; for a larger actor only some of the layers are timed."""
ROUNDS, REPEATS = 4, 3
LONGEST_S = 0.15
"""After this time a step is not repeated further in a round: a calibration should take seconds."""
MOST_WAITED = 0.25
"""Share of a calibration in which some program waits for a core. Alone it is next to nothing."""
PYTHON_REFERENCE_S = 0.0035
"""Seconds of `python_work` on the machine where `HOST` was measured."""


@dataclass(frozen=True)
class HostCosts:
    """vLLM's work on the host in a step, in seconds on the machine of PYTHON_REFERENCE_S.

    Fitted to `gsm8k-4m` in float32 (vLLM 0.32), minus the microbenchmarks at the same sizes: the
    constants to rollouts of one sequence, with and without drafts (`medusa-ppo bench rollout`), the
    costs of a sequence to a rollout of 256 responses (`benchmarks/tail_on_paper.py`). A step with
    drafts costs more because vLLM schedules it only when the one before has ended.

    Attributes:
        plain_s, plain_sequence_s: vLLM's plain step: a constant, and for each running sequence.
        drafted_s, drafted_sequence_s: the same for steps with drafts.
    """

    plain_s: float = 0.0017
    plain_sequence_s: float = 80e-6
    drafted_s: float = 0.0038
    drafted_sequence_s: float = 160e-6


HOST = HostCosts()


def python_work() -> None:
    """A fixed piece of Python, of the kind found in a scheduler."""
    table: dict[int, list[int]] = {}
    for number in range(40_000):
        table.setdefault(number % 97, []).append(number)
    sum(len(found) for found in table.values())


def seconds_of(steps: Sequence[Mapping[Operation, Callable[[], Any]]]) -> dict[Operation, float]:
    """How long each operation takes, in the order in which the steps of an engine have them: each
    finds in the caches what the ones before it have left there.

    It is the lowest median of several rounds through all steps. Another program that takes a core
    for a moment makes operations on several threads up to a hundred times as slow; in rounds it
    meets an operation once, and not in all repetitions.
    """
    rounds = []
    for _ in range(ROUNDS):
        found: dict[Operation, list[float]] = defaultdict(list)
        for step in steps:
            began = time.perf_counter()
            for _ in range(REPEATS):
                for name, call in step.items():
                    found[name].append(_seconds(call))
                if time.perf_counter() - began > LONGEST_S:
                    break
        rounds.append({name: statistics.median(times) for name, times in found.items()})
    return {name: min(times[name] for times in rounds) for name in rounds[0]}


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class CpuSteps:
    """Step times on this machine.

    Attributes:
        source: where the seconds come from, in words.
        measured: every microbenchmark, for `--json`.
    """

    def __init__(
        self,
        model: ModelSizes,
        heads: HeadsConfig,
        dtype: torch.dtype,
        product: PACK,
        pack: PACK,
        sequences: int,
        context: float,
        host: HostCosts = HOST,
    ) -> None:
        """
        Args:
            product: turns a weight of the actor into a function that multiplies by it as vLLM does.
            pack: the same for the heads.
            sequences: maximum number that run at once.
            context: tokens that each sequence has in the cache while steps are timed.
        """
        self._host = host
        self._context = context
        self._sizes = sorted({1, 4, 16, 64, sequences} & set(range(1, sequences + 1)))
        self._drafts = sorted({0, 1, 2, heads.num_heads})
        actor = _Actor(model, dtype, product, int(context), max(self._sizes))
        drafter = _Drafting(heads, model, dtype, product, pack, max(self._sizes), int(context))
        cells = [(size, drafts) for size in self._sizes for drafts in self._drafts]
        rows = sorted({size * (drafts + 1) for size, drafts in cells})
        drafted = [(size, drafts) for size, drafts in cells if drafts]
        steps: list[dict[Operation, Callable[[], Any]]] = [{("python",): python_work}]
        for size, drafts in cells:
            count = size * (drafts + 1)
            step: dict[Operation, Callable[[], Any]] = {
                ("layers", count): partial(actor.layers, count),
                ("attention", size, drafts): partial(actor.attention, size, drafts + 1),
                ("logits", count): partial(actor.logits, count),
            }
            if drafts:
                step["verify", size, drafts] = partial(actor.verify, size, drafts)
                step["draft", size, drafts] = partial(drafter.call, size, drafts)
            else:
                step["sampler", size] = partial(actor.sample, size)
            steps.append(step)
        began_s, wanted_s = time.perf_counter(), cores_wanted_s()
        times = seconds_of(steps)
        # NaN where the kernel does not count it.
        waited = (cores_wanted_s() - wanted_s) / (time.perf_counter() - began_s)
        self._speed = times["python",] / PYTHON_REFERENCE_S
        self._pass = {
            count: actor.scale * times["layers", count] + times["logits", count] for count in rows
        }
        self._attention = {(s, k): actor.scale * times["attention", s, k] for s, k in cells}
        self._sampler = {size: times["sampler", size] for size in self._sizes}
        self._verify = {(s, k): times["verify", s, k] for s, k in drafted}
        self._draft = {(s, k): times["draft", s, k] for s, k in drafted}
        self.source = "microbenchmarks on this CPU"
        if waited > MOST_WAITED:
            self.source += (
                f". Other programs wanted its cores in {100 * waited:.0f} % of that time, so the"
                " figures are off: repeat it when nothing else runs"
            )
        self.measured = {
            "threads": torch.get_num_threads(),
            "dtype": str(dtype).removeprefix("torch."),
            "python_over_reference": self._speed,
            "waited_frac": None if math.isnan(waited) else waited,
            "host": asdict(host),
            "products_s": {str(n): s for n, s in self._pass.items()},
            "attention_s": {f"{s}x{k}": t for (s, k), t in self._attention.items()},
            "sampler_s": {str(s): t for s, t in self._sampler.items()},
            "verification_s": {f"{s}x{k}": t for (s, k), t in self._verify.items()},
            "drafting_s": {f"{s}x{k}": t for (s, k), t in self._draft.items()},
        }

    def plain(self, sequences: float, context: float) -> float:
        host = self._speed * (self._host.plain_s + self._host.plain_sequence_s * sequences)
        return host + self._forward(sequences, 0, context) + _between(self._sampler, sequences)

    def drafted(self, sequences: float, drafts: int, context: float) -> float:
        if not drafts:
            # A step without drafts takes vLLM's plain path.
            return self.plain(sequences, context)
        host = self._speed * (self._host.drafted_s + self._host.drafted_sequence_s * sequences)
        return (
            host
            + self._forward(sequences, drafts, context)
            + self._of_drafts(self._verify, sequences, drafts)
            + self._of_drafts(self._draft, sequences, drafts)
        )

    def prefill(self, tokens: float) -> float:
        most = max(self._pass)
        return tokens * self._pass[most] / most

    def _forward(self, sequences: float, drafts: int, context: float) -> float:
        attention = self._of_drafts(self._attention, sequences, drafts)
        longer = max(context, 1.0) / max(self._context, 1.0)
        return _between(self._pass, sequences * (drafts + 1)) + attention * longer

    def _of_drafts(
        self, cells: dict[tuple[int, int], float], sequences: float, drafts: int
    ) -> float:
        """The value of `cells` (by sequences and drafts) at these sizes, interpolated linearly."""
        line = {
            count: _between({s: t for (s, k), t in cells.items() if k == count}, sequences)
            for count in {k for _, k in cells}
        }
        return _between(line, drafts)


def _between(cells: dict[int, float], at: float) -> float:
    """Interpolate linearly between the two nearest sizes; extrapolate beyond the last."""
    sizes = sorted(cells)
    if len(sizes) == 1:
        return cells[sizes[0]]
    high = min(max(bisect_left(sizes, at), 1), len(sizes) - 1)
    first, second = sizes[high - 1], sizes[high]
    share = (at - first) / (second - first)
    return cells[first] + share * (cells[second] - cells[first])


class _Actor:
    """A model of the actor's sizes with random weights, packed as vLLM packs them.

    Attributes:
        scale: how many of the actor's layers each created layer stands for.
    """

    def __init__(
        self, model: ModelSizes, dtype: torch.dtype, product: PACK, context: int, most: int
    ) -> None:
        def weight(inputs: int, outputs: int) -> Any:
            made = torch.randn(outputs, inputs) / math.sqrt(inputs)
            return product(made.to(dtype))

        sides = [(inputs, outputs) for _, inputs, outputs in layer_products(model, 1, 1)]
        layer_bytes = sum(i * o for i, o in sides) * torch.finfo(dtype).bits // 8
        layers = max(1, min(model.layers, MOST_WEIGHTS // layer_bytes))
        self.scale = model.layers / layers
        self._model = model
        self._dtype = dtype
        self._layers = [[weight(*side) for side in sides] for _ in range(layers)]
        self._lm_head = weight(model.hidden, model.vocab)
        self._norm = torch.ones(model.hidden, dtype=dtype)
        shape = (most, model.kv_heads, max(1, context), model.head_dim)
        # Always float32: torch's kernel for a single 16-bit row is far slower than vLLM's.
        self._keys, self._values = torch.randn(shape), torch.randn(shape)
        self._logits: dict[int, torch.Tensor] = {}

    def layers(self, rows: int) -> None:
        """The matrix products of all layers, and the operations between them."""
        model = self._model
        hidden_ND = torch.ones(rows, model.hidden, dtype=self._dtype)
        width = model.heads * model.head_dim
        for qkv, out, up, down in self._layers:
            normed_ND = F.rms_norm(hidden_ND, self._norm.shape, self._norm)
            queries = qkv(normed_ND)[:, :width]
            hidden_ND = hidden_ND + out(queries.contiguous()).to(self._dtype)
            wide = up(F.rms_norm(hidden_ND, self._norm.shape, self._norm))
            if model.gated:
                wide = F.silu(wide[:, : model.intermediate]) * wide[:, model.intermediate :]
            hidden_ND = hidden_ND + down(wide).to(self._dtype)

    def logits(self, rows: int) -> None:
        """The matrix product with lm_head."""
        self._lm_head(torch.ones(rows, self._model.hidden, dtype=self._dtype))

    def attention(self, sequences: int, queries: int) -> None:
        """The attention of new rows on the cache, in all layers. Rows with the same keys share one
        matrix product, so that keys are read once, as in vLLM's kernel.
        """
        model = self._model
        rows = queries * model.heads // model.kv_heads
        asked = torch.ones(sequences, model.kv_heads, rows, model.head_dim)
        keys, values = self._keys[:sequences], self._values[:sequences]
        for _ in self._layers:
            F.scaled_dot_product_attention(asked, keys, values)

    def _rows(self, rows: int) -> torch.Tensor:
        if rows not in self._logits:
            self._logits[rows] = torch.randn(rows, self._model.vocab)
        return self._logits[rows]

    def sample(self, sequences: int) -> None:
        """The work of vLLM's sampler: one fused draw, and the log-probs and ranks that PPO asks
        for.
        """
        self._score(self._rows(sequences).div(1.0).argmax(-1), sequences)

    def _score(self, ids_N: torch.Tensor, rows: int) -> None:
        logp_NV = self._rows(rows).log_softmax(-1)
        chosen_N1 = logp_NV.gather(1, ids_N.unsqueeze(1))
        (logp_NV >= chosen_N1).sum(-1)

    def verify(self, sequences: int, drafts: int) -> None:
        """Our verification of sampled drafts, and the log-probs of what was accepted."""
        ids_T = torch.ones(sequences * drafts, dtype=torch.int64)
        counts = [drafts] * sequences
        proposed = Proposed(None, torch.rand(sequences, drafts + 1, dtype=torch.float64))
        logits_NV = self._rows(sequences * (drafts + 1)).div(1.0)
        verify_rows(logits_NV, None, DraftRows.build(ids_T, counts), counts, proposed, Rule())
        rows = sequences * (drafts + 1)
        self._score(torch.ones(rows, dtype=torch.int64), rows)


class _Drafting:
    """Our drafting call on random heads, each request with a text of the given length."""

    NEW_TOKENS = 2

    def __init__(
        self,
        config: HeadsConfig,
        model: ModelSizes,
        dtype: torch.dtype,
        product: PACK,
        pack: PACK,
        most: int,
        context: int,
    ) -> None:
        heads = MedusaHeads(config)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(std=0.05)
        heads = heads.to(dtype).requires_grad_(False)
        lm_head = pack((torch.randn(model.vocab, model.hidden) * 0.05).to(dtype))
        table_VD = torch.randn(model.vocab, model.hidden).to(dtype)
        self._core = DraftingCore(heads, lm_head, lambda ids: F.embedding(ids, table_VD), pack)
        self._hidden = model.hidden
        self._dtype = dtype
        self._context = max(self.NEW_TOKENS, context)
        cpu = torch.device("cpu")
        self._slots = DraftSlots(most, config.num_heads, model.vocab, cpu)
        self._pairs: PairRing | None = None
        self._texts: TextRing | None = None
        fused = self._core.fused
        if isinstance(fused, ContextHeads):
            self._pairs = PairRing(most, config.context, fused.kept_width, fused.dtype, cpu)
        if self._core.copier is not None:
            width = config.copy_width // config.copy_parts
            self._texts = TextRing(most, COPY_WINDOW, config.copy_parts, width, dtype, cpu)
            kept = min(self._context, COPY_WINDOW)
            places_N = torch.arange(self._context - kept, self._context)
            for request in range(most):
                ids_N = torch.randint(model.vocab, (kept,))
                self._core.copier.write(
                    self._texts, torch.full_like(places_N, request), places_N, ids_N
                )

    def call(self, batch: int, drafts: int) -> None:
        """One call, with two new tokens per request since the previous one."""
        hidden_BD = torch.ones(batch, self._hidden, dtype=self._dtype)
        requests_B = torch.arange(batch)
        places_B = torch.full((batch,), self._context)
        ids_B = torch.ones_like(requests_B)
        noise_BK = uniforms(places_B, None, None, DRAFT_STREAM, drafts)
        self._core.draft(
            hidden_BD,
            ids_B,
            drafts,
            DraftSampling(torch.ones(batch), noise_BK),
            seen=self._seen(hidden_BD, requests_B, places_B),
            slots=self._slots,
        )
        self._slots.stamp(requests_B, stamps(places_B, places_B), drafts)

    def _seen(
        self, hidden_BD: torch.Tensor, requests_B: torch.Tensor, places_B: torch.Tensor
    ) -> Seen | None:
        fused = self._core.fused
        if not isinstance(fused, ContextHeads) or self._pairs is None:
            return None
        new = self.NEW_TOKENS
        request_N = requests_B.repeat_interleave(new)
        back_N = torch.arange(new - 1, -1, -1).repeat(len(requests_B))
        at_N = places_B[request_N] - back_N
        ids_N = torch.ones_like(request_N)
        arrived = Arrived(
            hidden_BD[request_N], ids_N, request_N, request_N, at_N, new * requests_B + new - 1
        )
        seen = fused.look_back(self._pairs, arrived, Standing(requests_B, requests_B, places_B))
        if self._core.copier is None or self._texts is None:
            return seen
        self._core.copier.write(self._texts, request_N, at_N, ids_N)
        told = self._core.copier.find(self._texts, requests_B, places_B, self._context + 1)
        return replace(seen, told_BKH=told)

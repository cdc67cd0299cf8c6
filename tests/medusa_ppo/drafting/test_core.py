"""The drafting call: the numbers of the trainer's heads, drawn from the q that is kept, in as many
operations at any size.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode

from heads.acceptance import draft_logprobs_for_rows
from heads.checkpoint import load_heads
from heads.errors import ConfigError
from heads.heads_config import HeadsConfig
from heads.modules import Context, MedusaHeads
from heads.targets import MISSING
from medusa_ppo.drafting import context, products
from medusa_ppo.drafting.core import DraftingCore, DraftSampling, cut
from medusa_ppo.drafting.noise import DRAFT_STREAM, keys_of, uniforms
from medusa_ppo.drafting.products import plain_linear
from medusa_ppo.drafting.slots import DraftSlots, stamps
from tests.conftest import ROOT

D, V, K, B = 8, 12, 4, 5
CPU = torch.device("cpu")
MOST_OPERATIONS_A_HEAD = {"hydra": 40, "context": 54}


PAIRS = 3


def random_heads(
    form: str,
    lm_head: str = "shared",
    layers: int = 1,
    width: int = D,
    device: torch.device = CPU,
) -> MedusaHeads:
    """Of a kind, or of kind hydra with a context."""
    torch.manual_seed(1)
    kind, pairs = ("hydra", PAIRS) if form == "context" else (form, 0)
    sizes = HeadsConfig(width, V, K, kind=kind, lm_head=lm_head, num_layers=layers, context=pairs)
    heads = MedusaHeads(sizes).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter) / (4 if pairs else 2))
    return heads.to(device)


def numbers(device: torch.device) -> torch.Tensor:
    """What draws the drafts of B requests, `BK`."""
    return torch.rand(B, K, dtype=torch.float64, device=device)


class TableActor:
    """lm_head and embedding table of an actor, and inputs that it gave."""

    def __init__(
        self, batch: int = B, dtype: torch.dtype = torch.float32, device: str | torch.device = CPU
    ) -> None:
        generator = torch.Generator().manual_seed(2)
        make = [
            torch.randn(rows, D, generator=generator).to(device, dtype) for rows in (V, V, batch)
        ]
        self.lm_head_VD, self.table_VD, self.hidden_BD = make
        self.last_B = torch.randint(V, (batch,), generator=generator).to(device)

    def core(self, heads: MedusaHeads, **options: object) -> DraftingCore:
        return DraftingCore(
            heads, plain_linear(self.lm_head_VD), lambda i: F.embedding(i, self.table_VD), **options
        )


def one_step(
    core: DraftingCore, slots: DraftSlots, actor: TableActor, seeded: bool
) -> torch.Tensor:
    """What a step asks for: noise, drafts, q kept."""
    count = actor.hidden_BD.shape[0]
    positions_B = torch.arange(count, device=actor.last_B.device)
    keys_B = positions_B * 3 if seeded else None
    sampling = DraftSampling(
        torch.ones_like(positions_B, dtype=torch.float32),
        uniforms(positions_B, keys_B, None, DRAFT_STREAM, K),
    )
    drafted = core.draft(actor.hidden_BD, actor.last_B, K, sampling, slots=slots)
    slots.stamp(positions_B, stamps(positions_B, positions_B), K)
    return drafted.ids_BK


def teacher_logits(heads: MedusaHeads, actor: TableActor, ids_BK: torch.Tensor) -> torch.Tensor:
    condition_BK = torch.cat([actor.last_B[:, None], ids_BK[:, :-1]], dim=1)
    pairs = None
    if heads.config.context:  # Each stands at its only pair.
        own_B1 = torch.arange(len(ids_BK), device=ids_BK.device).unsqueeze(1)
        rows_Bn = own_B1.masked_fill(torch.arange(PAIRS, device=ids_BK.device) < PAIRS - 1, MISSING)
        pairs = Context.of(rows_Bn, actor.hidden_BD, actor.last_B)
    return heads(
        actor.hidden_BD,
        actor.lm_head_VD,
        condition=condition_BK,
        embedding_VD=actor.table_VD,
        context=pairs,
    )


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "context"])
def test_drafts_and_q_are_those_of_the_trainers_heads(
    device: torch.device,
    kind: str,
    lm_head: str,
    layers: int,
    tables: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not tables:
        monkeypatch.setattr(products, "TABLE_ENTRIES", 0)
        monkeypatch.setattr(context, "TABLE_ENTRIES", 0)
    heads = random_heads(kind, lm_head, layers, device=device)
    actor = TableActor(device=device)
    core = actor.core(heads)
    drafted = core.draft(actor.hidden_BD, actor.last_B, K)
    assert (
        torch.equal(drafted.ids_BK, teacher_logits(heads, actor, drafted.ids_BK).argmax(-1))
        and not drafted.q
    )
    assert torch.equal(core.draft(actor.hidden_BD, actor.last_B, 1).ids_BK, drafted.ids_BK[:, :1])
    core.temperatures_K.copy_(torch.tensor([1.0, 2.0, 0.5, 1.5], device=device))
    temperature_B = torch.tensor([1.0, 0.0, 0.7, 1.3, 0.2], device=device)
    sampled = core.draft(
        actor.hidden_BD,
        actor.last_B,
        K,
        DraftSampling(temperature_B, numbers(device)),
    )
    logits_BKV = teacher_logits(heads, actor, sampled.ids_BK)
    expected_BKV = (
        logits_BKV / (temperature_B.view(B, 1, 1) * core.temperatures_K.view(1, K, 1))
    ).softmax(-1)
    q_BKV = torch.stack(sampled.q, dim=1)
    random = temperature_B > 0
    torch.testing.assert_close(q_BKV[random], expected_BKV[random], rtol=1e-3, atol=1e-5)
    assert torch.equal(sampled.ids_BK[~random], logits_BKV[~random].argmax(-1))
    assert torch.equal(q_BKV[~random], F.one_hot(sampled.ids_BK[~random], V).float())


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_q_is_the_replays_with_each_heads_own_temperature(device: torch.device, kind: str) -> None:
    """Times the engine's, and after a load that of the new heads."""
    heads = random_heads(kind, device=device)
    actor = TableActor(device=device)
    heads.temperatures_K.copy_(torch.tensor([0.75, 1.0, 1.5, 2.0], device=device))
    core = actor.core(heads)
    core.use_temperature(0.5)
    for _ in range(2):
        drafted = core.draft(
            actor.hidden_BD,
            actor.last_B,
            K,
            DraftSampling(torch.full((B,), 0.7, device=device), numbers(device)),
        )
        condition_BK = torch.cat([actor.last_B[:, None], drafted.ids_BK[:, :-1]], dim=1)
        tables = {"condition_MK": condition_BK, "embedding_VD": actor.table_VD}
        logq_1BK = draft_logprobs_for_rows(
            heads, actor.hidden_BD, drafted.ids_BK, actor.lm_head_VD, temperatures=(0.35,), **tables
        )
        q_BK = torch.stack(
            [q_BV.gather(1, drafted.ids_BK[:, [k]]).squeeze(1) for k, q_BV in enumerate(drafted.q)],
            dim=1,
        )
        torch.testing.assert_close(q_BK, logq_1BK[0].exp(), rtol=1e-3, atol=1e-5)
        heads.load_trainable_state(
            {name: tensor + 0.1 for name, tensor in heads.trainable_state().items()}
        )
        core.load()
    heads.load_trainable_state(
        {name: view.clone() for name, view in heads.trainable_views().items()}
    )
    core.load()
    assert core.temperatures_K.tolist() == [0.5] * K


OLD = ROOT / "tests" / "heads" / "heads_of_0_3_0"


@pytest.mark.parametrize(
    "form", sorted(path.name for path in OLD.iterdir() if path.is_dir() and path.name != "markov")
)
def test_heads_of_0_3_0_draft_as_they_did(form: str) -> None:
    """How the folder was made: tests/heads/test_checkpoint.py. q is that of the log-probs noted
    there; a token that a head drafts is the next one's condition.
    """
    heads, _ = load_heads(OLD / form)
    heads.requires_grad_(False)
    expected = load_file(OLD / "expected.safetensors")
    lm_head_VD, table_VD = expected["lm_head_VD"], expected["embedding_VD"]
    core = DraftingCore(heads, lambda rows: rows @ lm_head_VD.T, lambda ids: table_VD[ids])
    given = expected["hidden_2TD"].flatten(0, 1), expected["ids_2T"].flatten()
    count = heads.config.num_heads
    assert torch.equal(core.draft(*given, count).ids_BK, expected[f"{form}.drafts_NK"])
    # Each response's first row has no earlier pair, as in the drafting call.
    firsts = slice(None, None, expected["ids_2T"].shape[1])
    ones_B = torch.ones(2)
    how = DraftSampling(ones_B, torch.zeros(2, count, dtype=torch.float64))
    q_2V = core.draft(given[0][firsts], given[1][firsts], count, how).q[0]
    noted_2V = expected[f"{form}.logprobs_2TKV"][:, 0, 0].exp()
    torch.testing.assert_close(q_2V, noted_2V, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["hydra", "context"])
def test_heads_that_change_draft_after_the_next_load(device: torch.device, form: str) -> None:
    heads = random_heads(form, device=device)
    actor = TableActor(device=device)
    core = actor.core(heads)
    core.draft(actor.hidden_BD, actor.last_B, K)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter))
    core.load()
    drafted = core.draft(actor.hidden_BD, actor.last_B, K)
    assert torch.equal(drafted.ids_BK, teacher_logits(heads, actor, drafted.ids_BK).argmax(-1))
    actor.table_VD.copy_(torch.randn_like(actor.table_VD))
    core.actor_changed()
    drafted = core.draft(actor.hidden_BD, actor.last_B, K)
    assert torch.equal(drafted.ids_BK, teacher_logits(heads, actor, drafted.ids_BK).argmax(-1))


@pytest.mark.parametrize("form", ["hydra", "context"])
def test_bfloat16_heads_draft_close_to_the_trainers(device: torch.device, form: str) -> None:
    heads = random_heads(form, device=device).bfloat16()
    actor = TableActor(dtype=torch.bfloat16, device=device)
    drafted = actor.core(heads).draft(
        actor.hidden_BD,
        actor.last_B,
        K,
        DraftSampling(torch.ones(B, device=device), numbers(device)),
    )
    expected_BKV = teacher_logits(heads, actor, drafted.ids_BK).log_softmax(-1)
    apart = (torch.stack(drafted.q, dim=1).log() - expected_BKV).square().mean().sqrt()
    assert apart < 0.03 * expected_BKV.std()


@pytest.mark.parametrize("kind", ["medusa", "hydra", "context"])
def test_sampled_drafts_come_from_the_q_that_is_kept(device: torch.device, kind: str) -> None:
    trials = 20_000
    heads = random_heads(kind, device=device)
    actor = TableActor(1, device=device)
    slots = DraftSlots(trials, K, V, device)
    slots_B = torch.arange(trials, device=device)
    hidden_BD = actor.hidden_BD.expand(trials, D)
    last_B = actor.last_B.expand(trials)
    keys_B = keys_of(range(trials)).to(device)
    sampling = DraftSampling(
        torch.full((trials,), 0.9, device=device),
        uniforms(torch.full((trials,), 17, device=device), keys_B, None, DRAFT_STREAM, K),
    )
    drafted = actor.core(heads).draft(hidden_BD, last_B, K, sampling, slots=slots)
    slots.stamp(slots_B, slots_B, K)
    kept = slots.look_up(slots_B, slots_B, K)
    for k in range(K):
        q_BV = slots.q(kept.rows_B, torch.full((trials,), k, device=device))
        assert torch.equal(kept.q_BK[:, k], q_BV.gather(1, drafted.ids_BK[:, k : k + 1]).squeeze(1))
        seen_V = torch.bincount(drafted.ids_BK[:, k], minlength=V).double()
        expected_V = q_BV.double().sum(0)
        likely = expected_V > 5
        expected_V = expected_V * seen_V[likely].sum() / expected_V[likely].sum()
        assert (
            chisquare(seen_V[likely].cpu().numpy(), expected_V[likely].cpu().numpy()).pvalue > 1e-3
        ), k


@pytest.mark.parametrize("kind", ["medusa", "hydra", "context"])
def test_a_draft_vocabulary_is_drafted_from_alone_and_mapped(
    device: torch.device, kind: str
) -> None:
    heads = random_heads(kind, device=device)
    actor = TableActor(device=device)
    ids_W = torch.tensor([1, 3, 4, 8, 11], device=device)
    core = actor.core(heads)
    core.use_vocabulary(ids_W, lambda f: F.linear(f, actor.lm_head_VD[ids_W]))
    drafted = core.draft(
        actor.hidden_BD,
        actor.last_B,
        K,
        DraftSampling(torch.ones(B, device=device), numbers(device)),
    )
    assert torch.isin(drafted.ids_BK, ids_W).all()
    logits_BKW = teacher_logits(heads, actor, drafted.ids_BK)[:, :, ids_W]
    torch.testing.assert_close(
        torch.stack(drafted.q, dim=1), logits_BKW.softmax(-1), rtol=1e-3, atol=1e-5
    )
    greedy = core.draft(actor.hidden_BD, actor.last_B, K)
    assert torch.equal(
        greedy.ids_BK, ids_W[teacher_logits(heads, actor, greedy.ids_BK)[:, :, ids_W].argmax(-1)]
    )


def test_heads_are_held_once(device: torch.device) -> None:
    """Their parameters are views of what is multiplied with, so new values need no second copy."""
    heads = random_heads("hydra", device=device)
    actor = TableActor(device=device)
    fused_heads = actor.core(heads).fused
    held = {
        tensor.untyped_storage().data_ptr() for tensor in (fused_heads._in_RE, fused_heads._out_KRH)
    }
    assert {
        weight.untyped_storage().data_ptr() for weight in [*heads.mlp_in, heads.mlp_out]
    } == held


def test_own_lm_heads_have_no_draft_vocabulary() -> None:
    with pytest.raises(ConfigError, match="lm_head=own"):
        TableActor().core(random_heads("medusa", "own")).use_vocabulary(
            torch.tensor([1]), lambda f: f
        )


def test_a_seeded_draft_depends_on_nothing_else_in_the_batch(device: torch.device) -> None:
    """Not on its place, not on its neighbours, not on the slot."""
    heads = random_heads("hydra", device=device)
    actor = TableActor(40, device=device)
    core = actor.core(heads)
    keys_B = keys_of(range(40)).to(device)
    positions_B = torch.arange(40, device=device) * 3
    temperature_B = torch.linspace(0, 1.5, 40, device=device)

    def drafts(rows: torch.Tensor) -> torch.Tensor:
        noise_BK = uniforms(positions_B[rows], keys_B[rows], None, DRAFT_STREAM, K)
        return core.draft(
            actor.hidden_BD[rows],
            actor.last_B[rows],
            K,
            DraftSampling(temperature_B[rows], noise_BK),
        ).ids_BK

    together_BK = drafts(torch.arange(40, device=device))
    for rows in (
        torch.arange(40, device=device).flip(0),
        torch.tensor([7], device=device),
        torch.tensor([39, 3, 12], device=device),
    ):
        assert torch.equal(drafts(rows), together_BK[rows])
    positions_B += 1
    assert not torch.equal(drafts(torch.arange(40, device=device)), together_BK)


def test_top_k_and_top_p_cut_each_row_by_its_own(device: torch.device) -> None:
    logits_BV = torch.tensor([0.4, 0.3, 0.2, 0.1], device=device).log().expand(5, 4)
    kept = cut(
        logits_BV,
        torch.tensor([1, 2, 4, 2048, 3], device=device),
        torch.tensor([1.0, 1.0, 0.65, 1.0, 0.5], device=device),
    ).isfinite()
    assert kept.sum(1).tolist() == [1, 2, 2, 4, 2]
    assert (
        cut(logits_BV, None, torch.full((5,), 1e-6, device=device)).isfinite().sum(1).tolist()
        == [1] * 5
    )


def test_a_cut_keeps_what_sorting_keeps(device: torch.device) -> None:
    """Up to tokens within the threshold's precision, of which random logits have hardly any."""
    torch.manual_seed(3)
    logits_BV = (torch.randn(64, 3000) * 3).to(device)
    top_k_B = torch.randint(1, 200, (64,)).to(device)
    top_p_B = torch.rand(64).to(device)
    for k_B, p_B in ((top_k_B, None), (None, top_p_B), (top_k_B, top_p_B)):
        ascending_BV, order_BV = logits_BV.sort(dim=-1)
        if k_B is not None:
            least_B1 = ascending_BV.gather(1, (3000 - k_B).unsqueeze(1))
            ascending_BV = ascending_BV.masked_fill(ascending_BV < least_B1, -torch.inf)
        if p_B is not None:
            out_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - p_B.unsqueeze(1)
            out_BV[:, -1] = False
            ascending_BV = ascending_BV.masked_fill(out_BV, -torch.inf)
        sorted_BV = torch.empty_like(logits_BV).scatter_(1, order_BV, ascending_BV)
        kept_BV = cut(logits_BV, k_B, p_B)
        apart_BV = kept_BV.isfinite() != sorted_BV.isfinite()
        assert apart_BV.sum() <= 3 and not (sorted_BV.isfinite() & ~kept_BV.isfinite()).any()
        assert torch.equal(kept_BV[kept_BV.isfinite()], logits_BV[kept_BV.isfinite()])


def test_a_cut_sorts_nothing(device: torch.device) -> None:
    """Sorting 150,000 tokens of each request was most of a draft's time where top-p is set."""
    with Counted() as mode:
        cut(
            torch.randn(4, 100, device=device),
            torch.full((4,), 5, device=device),
            torch.full((4,), 0.9, device=device),
        )
    assert not {"sort", "topk", "cumsum"} & {name.split(".")[0] for name in mode.names}


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["hydra", "context"])
@pytest.mark.parametrize("tables", [True, False])
def test_operations_do_not_grow_with_requests(
    tables: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tables:
        monkeypatch.setattr(products, "TABLE_ENTRIES", 0)
        monkeypatch.setattr(context, "TABLE_ENTRIES", 0)
    for seeded in (False, True):
        counts = []
        for batch in (1, 256):
            actor = TableActor(batch)
            core = actor.core(random_heads(form))
            slots = DraftSlots(256, K, V, torch.device("cpu"))
            with torch.inference_mode():
                one_step(core, slots, actor, seeded)  # What is made when first asked for is made.
                with Counted() as mode:
                    one_step(core, slots, actor, seeded)
            counts.append(mode.count)
        assert counts[0] == counts[1]
        assert counts[0] <= MOST_OPERATIONS_A_HEAD[form] * K, counts


@pytest.mark.parametrize("kind", ["medusa", "hydra", "context"])
def test_the_call_compiles_whole(device: torch.device, kind: str) -> None:
    heads = random_heads(kind, device=device)
    actor = TableActor(device=device)
    core = actor.core(heads)
    eager, compiled = (DraftSlots(B, K, V, device) for _ in range(2))
    positions_B = torch.arange(B, device=device)
    seeds_B = torch.arange(B, device=device) * 31
    temperature_B = torch.tensor([1.0, 0.0, 0.7, 1.3, 0.2], device=device)

    def step(slots: DraftSlots, hidden_BD: torch.Tensor, last_B: torch.Tensor) -> torch.Tensor:
        sampling = DraftSampling(
            temperature_B, uniforms(positions_B, seeds_B, None, DRAFT_STREAM, K)
        )
        drafted = core.draft(hidden_BD, last_B, K, sampling, slots=slots)
        slots.stamp(positions_B, stamps(positions_B, positions_B), K)
        return drafted.ids_BK

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(
            whole(compiled, actor.hidden_BD, actor.last_B),
            step(eager, actor.hidden_BD, actor.last_B),
        )
    torch.testing.assert_close(compiled.cumulative_KRX, eager.cumulative_KRX)
    assert torch.equal(compiled.stamps_R, eager.stamps_R)


def test_logits_that_overflow_leave_a_distribution_to_verify_by(device: torch.device) -> None:
    """In float16 one of 65,504 or more is inf, and the softmax of its row NaN."""
    heads = random_heads("hydra", device=device)
    actor = TableActor(dtype=torch.float16, device=device)
    calls: list[torch.Tensor] = []

    def lm_head(rows_ND: torch.Tensor) -> torch.Tensor:
        logits_NV = F.linear(rows_ND.half(), actor.lm_head_VD)
        calls.append(logits_NV)
        # The second head of all requests but the first one.
        if len(calls) == 2:
            logits_NV[1:, 3] = torch.inf
        return logits_NV

    core = DraftingCore(heads.half(), lm_head, lambda i: F.embedding(i, actor.table_VD))
    slots = DraftSlots(B, K, V, device)
    one_step(core, slots, actor, seeded=True)
    assert len(calls) == K
    slots_B = torch.arange(B, device=device)
    q_KBV = torch.stack([slots.q(slots_B, torch.full_like(slots_B, k)) for k in range(K)])
    assert bool(((q_KBV >= 0) & (q_KBV <= 1)).all())
    torch.testing.assert_close(q_KBV.sum(2), torch.ones_like(q_KBV[..., 0]))
    assert q_KBV[1, 1:, -1].tolist() == [1.0] * (B - 1) and float(q_KBV[1, 0].max()) < 1

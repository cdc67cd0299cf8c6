"""MedusaHeads: what each kind computes, teacher-forced and step by step, and how its state
travels.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from heads.errors import CheckpointError, ConfigError
from heads.heads_config import KINDS, LM_HEADS, HeadsConfig
from heads.modules import Context, MedusaHeads, rms_normalise
from heads.targets import MISSING, condition_ids, context_rows

D, V, K, B, T = 16, 40, 3, 2, 9
PAIRS = 4
CPU = torch.device("cpu")
FORMS = [*KINDS, "context"]
"""Kinds, and hydra heads with a context."""


def build(
    form: str,
    lm_head: str = "shared",
    layers: int = 2,
    *,
    noise: float = 0.2,
    device: torch.device = CPU,
) -> MedusaHeads:
    torch.manual_seed(0)
    kind, pairs = ("hydra", PAIRS) if form == "context" else (form, 0)
    heads = MedusaHeads(HeadsConfig(D, V, K, kind, layers, lm_head, context=pairs))
    if lm_head == "own":
        heads.init_own_lm_heads(tables()[0])
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return heads.to(device)


def tables(device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lm_head_VD, embedding_VD = (torch.randn(V, D, generator=generator) for _ in range(2))
    return lm_head_VD.to(device), embedding_VD.to(device)


def rows(device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden_BTD = torch.randn(B, T, D, generator=generator)
    return hidden_BTD.to(device), torch.randint(V, (B, T), generator=generator).to(device)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_untrained_heads_are_lm_head(device: torch.device, kind: str, lm_head: str) -> None:
    lm_head_VD, embedding_VD = tables(device)
    hidden_BTD, next_ids_BT = rows(device)
    heads = build(kind, lm_head, noise=0.0, device=device)
    logits_BTKV = heads(hidden_BTD, lm_head_VD, next_ids_BT=next_ids_BT, embedding_VD=embedding_VD)
    expected_BTV = F.linear(hidden_BTD, lm_head_VD)
    torch.testing.assert_close(logits_BTKV, expected_BTV.unsqueeze(2).expand_as(logits_BTKV))


def test_medusa_by_hand(device: torch.device) -> None:
    """One batched product equals head after head, layer after layer; layers are not tied."""
    heads = build("medusa", device=device)
    lm_head_VD, _ = tables(device)
    hidden_BTD, _ = rows(device)
    logits_BTKV = heads(hidden_BTD, lm_head_VD)
    assert logits_BTKV.shape == (B, T, K, V)
    state = heads.trainable_state()
    for k in range(K):
        x_BTD = hidden_BTD
        for layer in range(2):
            x_BTD = x_BTD + F.silu(F.linear(x_BTD, state[f"blocks.{k}.layers.{layer}.weight"]))
        torch.testing.assert_close(logits_BTKV[:, :, k], F.linear(x_BTD, lm_head_VD))
    assert not torch.equal(state["blocks.0.layers.0.weight"], state["blocks.0.layers.1.weight"])


def test_hydra_by_hand(device: torch.device) -> None:
    heads = build("hydra", layers=1, device=device)
    lm_head_VD, embedding_VD = tables(device)
    hidden_BTD, next_ids_BT = rows(device)
    logits_BTKV = heads(hidden_BTD, lm_head_VD, next_ids_BT=next_ids_BT, embedding_VD=embedding_VD)
    state = heads.trainable_state()
    for k in range(K):
        for t in range(T - k):
            parts = [rms_normalise(hidden_BTD[:, t])] + [
                rms_normalise(embedding_VD[next_ids_BT[:, t + j]]) for j in range(k + 1)
            ]
            x_BD = hidden_BTD[:, t] + F.linear(
                F.silu(F.linear(torch.cat(parts, -1), state[f"mlps.{k}.in.weight"])),
                state[f"mlps.{k}.out.weight"],
            )
            x_BD = x_BD + F.silu(F.linear(x_BD, state[f"blocks.{k}.layers.0.weight"]))
            torch.testing.assert_close(
                logits_BTKV[:, t, k], F.linear(x_BD, lm_head_VD), rtol=1e-4, atol=1e-4
            )


def one_row(
    state: dict[str, torch.Tensor],
    pairs: list[tuple[torch.Tensor, int]],
    tokens: list[int],
    embedding_VD: torch.Tensor,
) -> list:
    """What lm_head reads for head 1, 2, ... at one row: its pairs oldest first, its own last, and
    the tokens since.
    """
    c = D
    inputs = [
        torch.cat([rms_normalise(hidden_D), rms_normalise(embedding_VD[token])])
        for hidden_D, token in pairs
    ]
    query_c = state["context.in.weight"][:c] @ inputs[-1]
    share_m = torch.stack(
        [query_c @ (state["context.in.weight"][c : 2 * c] @ pair) / c**0.5 for pair in inputs]
    ).softmax(0)
    mixed_c = sum(
        share * (state["context.in.weight"][2 * c :] @ pair)
        for share, pair in zip(share_m, inputs, strict=True)
    )
    base_D = pairs[-1][0] + state["context.out.weight"] @ mixed_c
    inner_H = state["cell.start.weight"] @ rms_normalise(base_D)
    features = []
    for k, token in enumerate(tokens):
        state_H = rms_normalise(
            F.silu(inner_H + state["cell.token.weight"] @ rms_normalise(embedding_VD[token]))
        )
        inner_H = state["cell.step.weight"] @ state_H
        x_D = base_D + state["cell.out.weight"] @ state_H
        features.append(x_D + F.silu(state[f"blocks.{k}.layers.0.weight"] @ x_D))
    return features


def test_a_context_by_hand(device: torch.device) -> None:
    """Row by row: each attends to at most the last n pairs of its own sequence, itself among
    them.
    """
    heads = build("context", layers=1, device=device)
    lm_head_VD, embedding_VD = tables(device)
    hidden_BTD, next_ids_BT = rows(device)
    assert heads.config.context_parts == 1
    logits_BTKV = heads(hidden_BTD, lm_head_VD, next_ids_BT=next_ids_BT, embedding_VD=embedding_VD)
    state = heads.trainable_state()
    for b in range(B):
        for t in range(T - K + 1):
            pairs = [
                (hidden_BTD[b, j], int(next_ids_BT[b, j]))
                for j in range(max(0, t - PAIRS + 1), t + 1)
            ]
            expected = one_row(state, pairs, next_ids_BT[b, t : t + K].tolist(), embedding_VD)
            torch.testing.assert_close(
                logits_BTKV[b, t], torch.stack(expected) @ lm_head_VD.T, rtol=1e-4, atol=1e-4
            )


def test_the_attention_has_equal_parts() -> None:
    assert [
        HeadsConfig(width, V, K, "hydra", context=2).context_parts
        for width in (2, 16, 256, 4096, 330)
    ] == [1, 1, 4, 64, 5]


def test_a_pair_that_is_missing_says_nothing(device: torch.device) -> None:
    """Rows that see all but their oldest pairs are rows whose sequence began later."""
    heads = build("context", device=device)
    lm_head_VD, embedding_VD = tables(device)
    hidden_BTD, next_ids_BT = rows(device)
    hidden_TD = hidden_BTD[0]
    ids_T = next_ids_BT[0]
    condition_TK = condition_ids(ids_T, torch.zeros_like(ids_T), K)
    rows_Tn = context_rows(torch.zeros_like(ids_T), PAIRS)
    cut_Tn = torch.where(torch.arange(PAIRS, device=device) < PAIRS - 2, MISSING, rows_Tn)
    some = heads(
        hidden_TD,
        lm_head_VD,
        condition=condition_TK,
        embedding_VD=embedding_VD,
        context=Context.of(cut_Tn, hidden_TD, ids_T),
    )
    late = heads(
        hidden_TD[3:][None], lm_head_VD, next_ids_BT=ids_T[3:][None], embedding_VD=embedding_VD
    )[0]
    torch.testing.assert_close(some[4], late[1], rtol=1e-4, atol=1e-5)
    context = Context.of(rows_Tn, hidden_TD, ids_T)
    whole = heads(
        hidden_TD, lm_head_VD, condition=condition_TK, embedding_VD=embedding_VD, context=context
    )
    assert not torch.allclose(some[4], whole[4]) and torch.allclose(some[1], whole[1], atol=1e-5)


@pytest.mark.parametrize("kind", ["hydra"])
def test_a_head_sees_the_tokens_before_its_target_and_no_later_one(
    device: torch.device, kind: str
) -> None:
    lm_head_VD, embedding_VD = tables(device)
    hidden_BTD, next_ids_BT = rows(device)
    heads = build(kind, device=device)
    condition_BTK = condition_ids(next_ids_BT, torch.zeros_like(next_ids_BT), K)
    before = heads(hidden_BTD, lm_head_VD, condition=condition_BTK, embedding_VD=embedding_VD)
    for j in range(K):
        changed_BTK = condition_BTK.clone()
        changed_BTK[..., j] = (changed_BTK[..., j] + 1) % V
        after = heads(hidden_BTD, lm_head_VD, condition=changed_BTK, embedding_VD=embedding_VD)
        moved = [not torch.equal(before[:, :, k], after[:, :, k]) for k in range(K)]
        assert moved == [k >= j for k in range(K)]


@pytest.mark.parametrize("kind", FORMS)
def test_frozen_tables_get_no_gradient(device: torch.device, kind: str) -> None:
    lm_head_VD, embedding_VD = (table.requires_grad_() for table in tables(device))
    hidden_BTD, next_ids_BT = rows(device)
    heads = build(kind, device=device)
    heads(
        hidden_BTD, lm_head_VD, next_ids_BT=next_ids_BT, embedding_VD=embedding_VD
    ).square().mean().backward()
    assert lm_head_VD.grad is None and embedding_VD.grad is None
    assert all(
        parameter.grad is not None and bool(parameter.grad.any())
        for parameter in heads.parameters()
    )


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_state_round_trip(device: torch.device, kind: str, lm_head: str) -> None:
    one = build(kind, lm_head, device=device)
    other = build(kind, lm_head, noise=0.0, device=device)
    state = one.trainable_state()
    assert {
        name: tuple(tensor.shape) for name, tensor in state.items()
    } == one.config.tensor_shapes()
    pointers = [parameter.data_ptr() for parameter in other.parameters()]
    other.load_trainable_state(state)
    assert [parameter.data_ptr() for parameter in other.parameters()] == pointers
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_copy_not_a_view() -> None:
    heads = build("medusa")
    state = heads.trainable_state()
    state["blocks.0.layers.0.weight"].zero_()
    assert bool(heads.blocks[0][0].any())


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
def test_a_state_that_does_not_fit_changes_nothing(device: torch.device, fault: str) -> None:
    heads = build("medusa", device=device)
    before = heads.trainable_state()
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    name = "blocks.1.layers.0.weight"
    if fault == "missing":
        del state[name]
    elif fault == "unknown":
        state["blocks.9.layers.0.weight"] = state[name]
    elif fault == "shape":
        state[name] = torch.zeros(D, D + 1, device=device)
    else:
        state[name] = state[name].bfloat16()
    with pytest.raises(CheckpointError, match="blocks"):
        heads.load_trainable_state(state)
    assert all(
        torch.equal(before[name], tensor) for name, tensor in heads.trainable_state().items()
    )


def test_wrong_inputs_are_named() -> None:
    lm_head_VD, _ = tables()
    hidden_BTD, next_ids_BT = rows()
    with pytest.raises(ConfigError, match="lm_head"):
        build("medusa")(hidden_BTD)
    with pytest.raises(ConfigError, match="hidden states"):
        build("medusa")(hidden_BTD[..., :-1], lm_head_VD)
    with pytest.raises(ConfigError, match="does not fit"):
        build("medusa")(hidden_BTD, lm_head_VD[:-1])
    with pytest.raises(ConfigError, match="tokens since"):
        build("hydra")(hidden_BTD, lm_head_VD)
    with pytest.raises(ConfigError, match="embedding"):
        build("hydra")(hidden_BTD, lm_head_VD, next_ids_BT=next_ids_BT)
    with pytest.raises(ConfigError, match="pairs before"):
        condition_BTK = condition_ids(next_ids_BT, torch.zeros_like(next_ids_BT), K)
        build("context")(hidden_BTD, lm_head_VD, condition=condition_BTK, embedding_VD=tables()[1])
    with pytest.raises(ConfigError, match="share"):
        build("medusa").init_own_lm_heads(lm_head_VD)


def test_bfloat16_lm_head_with_float32_heads(device: torch.device) -> None:
    """The product runs in the lm_head's dtype, the logits are float32."""
    heads = build("medusa", device=device)
    lm_head_VD, _ = tables(device)
    hidden_BTD, _ = rows(device)
    logits = heads(hidden_BTD.bfloat16(), lm_head_VD.bfloat16())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, heads(hidden_BTD, lm_head_VD), rtol=0.1, atol=0.2)

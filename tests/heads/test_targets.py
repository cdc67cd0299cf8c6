"""The off-by-one, on a six-token example written out by hand."""

from __future__ import annotations

import pytest
import torch

from heads.targets import (
    MISSING,
    PADDING,
    condition_ids,
    context_rows,
    head_logprobs,
    head_targets,
    head_teacher_rows,
    look_ahead,
    segments_from_lengths,
    used_rows,
)

# Text x0 x1 x2 x3 x4 x5 x6 = 10 11 12 13 14 15 16. Row t holds h_t; lm_head predicts x_{t+1} from
# it, so next_ids = 11 .. 16.
NEXT_IDS = torch.tensor([11, 12, 13, 14, 15, 16])
ONE = torch.zeros(6, dtype=torch.int64)


def test_six_tokens_by_hand() -> None:
    targets_TK, mask_TK = head_targets(NEXT_IDS, ONE, 3)
    # head 1 at h_0 predicts x_2 = 12, head 2 x_3 = 13, head 3 x_4 = 14; and so on down to the last
    # row, which predicts nothing.
    assert targets_TK.tolist() == [
        [12, 13, 14],
        [13, 14, 15],
        [14, 15, 16],
        [15, 16, 0],
        [16, 0, 0],
        [0, 0, 0],
    ]
    assert mask_TK.tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]
    # head 1 is told x_1 = 11; head 2 also x_2 = 12; head 3 also x_3 = 13.
    assert condition_ids(NEXT_IDS, ONE, 3).tolist() == [
        [11, 12, 13],
        [12, 13, 14],
        [13, 14, 15],
        [14, 15, 16],
        [15, 16, 0],
        [16, 0, 0],
    ]


def test_heads_do_not_look_into_the_next_sequence_or_padding() -> None:
    segment_T = torch.tensor([0, 0, 1, 1, 1, PADDING])
    targets_TK, mask_TK = head_targets(NEXT_IDS, segment_T, 2)
    assert targets_TK.tolist() == [[12, 0], [0, 0], [14, 15], [15, 0], [0, 0], [0, 0]]
    assert mask_TK.tolist() == [[1, 0], [0, 0], [1, 1], [1, 0], [0, 0], [0, 0]]
    assert condition_ids(NEXT_IDS, segment_T, 2).tolist() == [
        [11, 12],
        [12, 0],
        [13, 14],
        [14, 15],
        [15, 0],
        [0, 0],
    ]


def test_every_target_has_all_its_conditions() -> None:
    lengths_S = torch.tensor([1, 4, 2, 7])
    segment_M = segments_from_lengths(lengths_S)
    next_ids_M = torch.arange(1, 15)
    targets_MK, mask_MK = head_targets(next_ids_M, segment_M, 4)
    condition_MK = condition_ids(next_ids_M, segment_M, 4)
    for row, head in mask_MK.nonzero().tolist():
        run = list(range(int(next_ids_M[row]), int(next_ids_M[row]) + head + 2))
        assert [*condition_MK[row, : head + 1].tolist(), int(targets_MK[row, head])] == run


def test_packed_and_batched_rows_agree() -> None:
    next_ids_BT = torch.randint(1, 50, (3, 6), generator=torch.Generator().manual_seed(0))
    segment_BT = torch.tensor([[0] * 6, [0] * 4 + [PADDING] * 2, [0] * 2 + [PADDING] * 4])
    targets_BTK, mask_BTK = head_targets(next_ids_BT, segment_BT, 4)
    packed = segment_BT != PADDING
    lengths_S = packed.sum(1)
    targets_MK, mask_MK = head_targets(next_ids_BT[packed], segments_from_lengths(lengths_S), 4)
    assert torch.equal(targets_BTK[packed], targets_MK) and torch.equal(mask_BTK[packed], mask_MK)


def test_log_probs_and_teacher_rows_stand_where_the_targets_stand() -> None:
    lengths_S = torch.tensor([3, 2])
    segment_M = segments_from_lengths(lengths_S)
    assert segment_M.tolist() == [0, 0, 0, 1, 1]
    logprobs_MK = head_logprobs(torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0]), segment_M, 2)
    assert logprobs_MK.tolist() == [[-2.0, -3.0], [-3.0, 0.0], [0.0, 0.0], [-5.0, 0.0], [0.0, 0.0]]
    assert head_teacher_rows(segment_M, 2).tolist() == [[1, 2], [2, 0], [0, 0], [4, 0], [0, 0]]


def test_more_heads_than_rows() -> None:
    targets_TK, mask_TK = head_targets(torch.tensor([7, 8]), torch.zeros(2, dtype=torch.int64), 5)
    assert targets_TK.tolist() == [[8, 0, 0, 0, 0], [0] * 5] and int(mask_TK.sum()) == 1


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="one shape"):
        look_ahead(NEXT_IDS, ONE[:-1], 1, 1)


def test_a_context_is_the_rows_before_in_the_same_sequence() -> None:
    rows_Mn = context_rows(torch.tensor([0, 0, 0, 0, 1, 1, PADDING]), 3)
    none = MISSING
    assert rows_Mn.tolist() == [
        [none, none, 0],
        [none, 0, 1],
        [0, 1, 2],
        [1, 2, 3],
        [none, none, 4],
        [none, 4, 5],
        [none, none, none],
    ]
    used_P, places_Nn = used_rows(rows_Mn[[5, 2]])
    assert used_P.tolist() == [0, 1, 2, 4, 5] and places_Nn.tolist() == [[none, 3, 4], [0, 1, 2]]

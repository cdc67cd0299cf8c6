"""A memory of earlier responses to the same prompt, as a second source of drafts.

The heads know the state, the memory knows the wording. Drafts are drawn from one mixture q = (1 -
w) q_heads + w q_memory: q_memory are counts of what followed suffixes of the text so far (drafts
included) wherever they occurred before, in responses to the same prompt that have ended or that run
beside this one; the longest suffix says most. w stands in a table by the length of that suffix and
by how sure the heads are, and is learned from what was accepted. All of it is fixed before a draft
is drawn, so q is exact and nothing is lost (docs/theory.md).

What stands in the texts is chosen on the host, between steps; what is looked up and mixed are
tensors of fixed shapes.

Shape letters: B requests, S slots, K drafts, n tokens of a suffix, P places of a text (tokens that
may come next), X = n + P, V vocabulary, W width of the draft vocabulary, C cells of the table, G
values that w may have.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from heads.errors import CheckpointError

SUFFIX = 12
"""Tokens of the longest suffix that is distinguished."""
# By replay, letting shorter suffixes vote, a quarter for each token less, beat the longest one
# alone: 2.423 against 2.405 tokens a step (benchmarks/RESULTS-archive.md).
NEARER = 4.0
"""Factor on the weight of a suffix per additional token."""
# Lengths of suffixes that share a cell, as reports name them; the bounds are their upper ends.
LENGTHS = ("1 to 2", "3 to 4", "5 to 6", "7 to 8", "9 to 11", "12 and more")
LENGTH_BOUNDS = (2, 4, 6, 8, 11)
TOPS = 6
"""Bins of the largest probability of the heads' q: with length, the cells of the table."""
FADE = 0.9
"""Factor on a count's weight with each new version of the policy."""
PLACES = 16_384
"""Most tokens of a text that are searched; newer responses come first."""
EMPTY, MISSING = -1, -2
"""Between responses of a text, and before the first token of a short one: equal to no token, nor to
each other.
"""
# 128 bits: two prompts never meet in one key by chance.
KEY_BYTES = 16
OVERHEAD = 256
"""Approximate bytes of a response besides its tokens."""
SHARES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
"""Possible values of w. Never all of one source: nothing is learned about what is never drafted."""
FIRST_SHARES = (0.6, 0.6, 0.5, 0.5, 0.3, 0.1)
"""w by bin of the heads' top, before anything is learned."""
PRIOR, MOST_SEEN = 3.0, 2000.0
"""Accepted drafts that the first w is defended with, and drafts after which older ones are
forgotten.
"""
MOST_OVER = 20.0
"""Limit on what one draft says about another w."""
UNIT = 1 << 30
"""Sums whose order nobody promises (those of a GPU's atomic additions) are made of whole numbers of
1 / UNIT: ranks of one engine that rounded differently would draw different tokens, each for itself.
"""


# ---- what was said, on the host


def prompt_key(prompt: Sequence[int]) -> bytes:
    """A key that is the same for the same tokens."""
    return blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=KEY_BYTES).digest()


class _Said(NamedTuple):
    """A response, the version of the policy that it began with, and its seed."""

    tokens: np.ndarray
    version: int
    seed: int | None


Row = tuple[str, int, int | None, list[int]]
"""A response on its way to another memory: the prompt's key (hex), versions of the policy since it
was begun, its seed, its tokens.
"""
TOKENS, TABLE, KEYS, NOW, OF = "tokens", "table", "keys", "version", "of."
"""Names in a saved memory: all tokens; of each response its length, version, whether it has a seed,
that seed, and its prompt; the prompts' keys; the policy's version; and digests of what it is a
memory of.
"""


class ResponseMemory:
    """Responses by prompt, within `most_bytes`; the least recently used prompt is dropped first,
    its oldest response first.

    Attributes:
        version: of the policy now.
        nbytes: what it holds.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self.version = 0
        self._said: OrderedDict[bytes, list[_Said]] = OrderedDict()

    def remember(
        self,
        key: bytes,
        response: Sequence[int],
        version: int | None = None,
        seed: int | None = None,
    ) -> None:
        """One response that has ended, to the prompt with this key; `version` of the policy that
        began it (None: of now).
        """
        # No text has room for more.
        tokens = np.asarray(response[-PLACES:], dtype=np.int32)
        size = tokens.nbytes + OVERHEAD
        if not len(tokens) or size > self.most_bytes:
            return
        self._said.setdefault(key, []).append(
            _Said(tokens, self.version if version is None else version, seed)
        )
        self._said.move_to_end(key)
        self.nbytes += size
        while self.nbytes > self.most_bytes:
            oldest, said = next(iter(self._said.items()))
            self.nbytes -= said.pop(0).tokens.nbytes + OVERHEAD
            if not said:
                del self._said[oldest]

    def take(self, rows: Iterable[Row]) -> None:
        """Responses that another memory had, or another engine wrote."""
        for key, age, seed, tokens in rows:
            # An age and not a version: each engine counts its versions from its own start.
            self.remember(bytes.fromhex(key), tokens, self.version - age, seed)

    def rows(self) -> list[Row]:
        """Everything, in the order in which it would be dropped."""
        return [
            (key.hex(), self.version - one.version, one.seed, one.tokens.tolist())
            # In this order `take` rebuilds what is forgotten first.
            for key, said in self._said.items()
            for one in said
        ]

    def state_dict(self, of: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
        """All of it as tensors. `of`: digests that say what it is a memory of."""
        said = [
            (place, one) for place, responses in enumerate(self._said.values()) for one in responses
        ]
        table = [
            (len(one.tokens), one.version, one.seed is not None, one.seed or 0, place)
            for place, one in said
        ]
        return {
            TOKENS: torch.cat(
                [
                    # `torch.cat` refuses an empty list, and a memory may be empty.
                    torch.zeros(0, dtype=torch.int32),
                    *(torch.from_numpy(one.tokens) for _, one in said),
                ]
            ),
            TABLE: torch.tensor(table, dtype=torch.int64).view(-1, 5),
            KEYS: torch.tensor(list(map(list, self._said)), dtype=torch.uint8).view(-1, KEY_BYTES),
            NOW: torch.tensor(self.version),
            **{
                OF + name: torch.tensor(list(digest), dtype=torch.uint8)
                for name, digest in of.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor], of: Mapping[str, bytes]) -> None:
        """Take over what was saved, as far as the budget goes, in the place of what is here.

        Raises:
            CheckpointError: it is damaged, or a memory of something else.
        """
        for name, digest in of.items():
            found = bytes(state.get(OF + name, torch.zeros(0, dtype=torch.uint8)).tolist())
            if found != digest:
                raise CheckpointError(
                    f"The saved responses belong to another {name}.",
                    given=f"{name} {found.hex()[:16] or 'unknown'}",
                    expected=f"{name} {digest.hex()[:16]}, that of this run",
                    do=(
                        f"Go on with the {name} that the run had, or without memory:"
                        " engine.memory_bytes=null --allow engine.memory_bytes."
                    ),
                )
        tokens_T, table_R5, keys_P = (
            state.get(name, torch.zeros(0, dtype=torch.int64)) for name in (TOKENS, TABLE, KEYS)
        )
        # What fits here can be split and looked up below without an error of torch's own.
        whole = NOW in state and table_R5.shape[1:] == (5,) and keys_P.shape[1:] == (KEY_BYTES,)
        lengths, places = (table_R5[:, 0].tolist(), table_R5[:, 4].tolist()) if whole else ([], [])
        if (
            not whole
            or sum(lengths) != len(tokens_T)
            or not all(n > 0 for n in lengths)
            or not all(0 <= p < len(keys_P) for p in places)
        ):
            given = f"{len(tokens_T)} tokens, {len(table_R5)} responses, {len(keys_P)} prompts"
            do = "Copy the checkpoint again, or start without --resume."
            raise CheckpointError(
                "The saved responses are damaged.",
                given=given,
                expected="a table that fits them",
                do=do,
            )
        self._said.clear()
        self.nbytes = 0
        self.version = int(state[NOW])
        keys = [bytes(key) for key in keys_P.tolist()]
        for tokens_L, (_, version, seeded, seed, place) in zip(
            tokens_T.split(lengths), table_R5.tolist(), strict=True
        ):
            self.remember(keys[place], tokens_L.tolist(), version, seed if seeded else None)

    def text(
        self,
        key: bytes,
        tail: Sequence[int],
        beside: Iterable[Sequence[int] | np.ndarray],
        places: int,
        seed: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """What was said to a prompt, the newest first, in `places` tokens at most: tokens `X`
        (int32) and weights `P` (float32).

        A token that may not come next (of the prompt, or none) weighs 0.

        Args:
            tail: the prompt's last tokens; they stand before each response.
            beside: what responses that have not ended have said so far.
            seed: of who will read it: what was drawn with the same random numbers is left out,
                because q may not depend on them.
        """
        said = self._said.get(key, [])
        if said:
            self._said.move_to_end(key)
        before = np.asarray(tail, dtype=np.int32)
        # Without a gap a suffix could begin in one response and end in the next.
        gap = np.array([EMPTY], dtype=np.int32)
        # A text is SUFFIX tokens longer than its places: `match` looks back from the first one too.
        tokens = [np.full(SUFFIX, EMPTY, dtype=np.int32)]
        weights = [np.zeros(0, dtype=np.float32)]
        newest_first = [
            (one.tokens, FADE ** (self.version - one.version))
            for one in reversed(said)
            if seed is None or one.seed != seed
        ]
        now = [(np.asarray(some, dtype=np.int32), 1.0) for some in beside if len(some)]
        # Those beside do not crowd out what has an end.
        room = places // 2 if said else places
        for part, more in ((now, places - room), (newest_first, 0)):
            for number, (response, weight) in enumerate(part):
                shown = response
                tail_T = before
                if len(before) + len(response) + 1 > room:
                    # Its last part, with as much room for those that follow: none hides the others.
                    length = room // (len(part) - number)
                    if length <= SUFFIX:
                        break
                    shown = response[1 - length :]
                    tail_T = gap[:0]
                weight_P = np.zeros(len(tail_T) + len(shown) + 1, dtype=np.float32)
                # The prompt's tail is context, not a vote; vLLM has placeholders below 0.
                weight_P[len(tail_T) : -1] = weight * (shown >= 0)
                tokens += [tail_T, shown, gap]
                weights.append(weight_P)
                room -= len(weight_P)
            room += more
        return np.concatenate(tokens), np.concatenate(weights)


def tail_of(prompt: Sequence[int], said: Sequence[int] = ()) -> list[int]:
    """The last `SUFFIX` tokens of a prompt and what was said to it; `MISSING` where there are
    fewer.
    """
    tail = [*prompt[-SUFFIX:], *said[-SUFFIX:]][-SUFFIX:]
    return [MISSING] * (SUFFIX - len(tail)) + tail


# ---- what followed a suffix


class Votes(NamedTuple):
    """What followed the suffixes of a text.

    Attributes:
        share_BP: float32, how much of q_memory each place of the text has; all 0 where nothing
            fits.
        length_B: int64, tokens of the longest suffix, 0: none fits.
    """

    share_BP: torch.Tensor
    length_B: torch.Tensor


def match(texts_BX: torch.Tensor, tails_Bn: torch.Tensor) -> torch.Tensor:
    """How many tokens before each place are those of the tail, from its last one backwards: int32
    `[B, P]`.
    """
    places = texts_BX.shape[1] - SUFFIX
    alike_BP = torch.ones(texts_BX.shape[0], places, dtype=torch.bool, device=texts_BX.device)
    run_BP = torch.zeros(alike_BP.shape, dtype=torch.int32, device=texts_BX.device)
    for back in range(1, SUFFIX + 1):
        # Only an unbroken run counts: once a token differs, what is further back adds nothing.
        alike_BP &= texts_BX[:, SUFFIX - back : SUFFIX - back + places] == tails_Bn[
            :, -back
        ].unsqueeze(1)
        run_BP += alike_BP
    return run_BP


def advance(texts_BX: torch.Tensor, run_BP: torch.Tensor, ids_B: torch.Tensor) -> torch.Tensor:
    """Update `match` by one more token."""
    # The run at a place goes on from the run at the place before it; a full search for each draft
    # would be SUFFIX comparisons.
    longer_BP = torch.nn.functional.pad(run_BP[:, :-1], (1, 0)) + 1
    return longer_BP.clamp_max_(SUFFIX) * (texts_BX[:, SUFFIX - 1 : -1] == ids_B.int().unsqueeze(1))


def vote(run_BP: torch.Tensor, weight_BP: torch.Tensor) -> Votes:
    """Counts after all suffixes that were followed by anything, by length."""
    run_BP = run_BP * (weight_BP > 0)
    length_B = run_BP.amax(1)
    # Relative to the longest: the share is the same, and all of float32's range is left for it.
    near_BP = (run_BP - length_B.unsqueeze(1)).float().mul_(math.log2(NEARER)).exp2_()
    voting_BP = near_BP.mul_(weight_BP).mul_(run_BP > 0)
    # Where nothing fits the sum is 0, and so shall the shares be, not NaN.
    return Votes(voting_BP / voting_BP.sum(1, keepdim=True).clamp_min(1e-30), length_B.long())


def cells_of(length_B: torch.Tensor, top_B: torch.Tensor) -> torch.Tensor:
    """The cell of a suffix's length and the largest probability of the heads' q; -1 without a
    suffix.
    """
    bins_B = sum((length_B > bound).long() for bound in LENGTH_BOUNDS) * TOPS + (
        top_B * TOPS
    ).long().clamp(0, TOPS - 1)
    return torch.where(length_B > 0, bins_B, -1)


class Drawn(NamedTuple):
    """Tokens as both sources saw them, in any one shape.

    Attributes:
        cells: int64, -1: the memory had no part in it.
        heads, memory: float32, q of each source.
        p: float32, the policy's probability times the weight w of the drafts before
            (`drafting.verify`): as a block is verified, of q as much is accepted as lies below.
        weight: float32, for each of them 1 / (the probability with which it came here); 0: it does
            not count.
    """

    cells: torch.Tensor
    heads: torch.Tensor
    memory: torch.Tensor
    p: torch.Tensor
    weight: torch.Tensor


class Trust:
    """The memory's share of a draft's q, by cell: the w with which most drafts would have been
    accepted.

    With any w the chance of acceptance is the sum over tokens of min(p, q), so a token that came
    with probability c says min(p, q) / c of it, for every w at once, whichever was served.
    """

    def __init__(self, device: torch.device) -> None:
        self._shares_G = torch.tensor(SHARES, device=device)
        self._first_C = torch.tensor(FIRST_SHARES, device=device).repeat(len(LENGTHS))
        self._accepted_CG = torch.zeros(len(self._first_C), len(SHARES), device=device)
        self._seen_C, self._offered_C, self._taken_C = (
            torch.zeros_like(self._first_C) for _ in range(3)
        )
        self._share_C = self._first_C

    def share(self, cells_B: torch.Tensor) -> torch.Tensor:
        """w of each cell; 0 without one."""
        return torch.where(cells_B >= 0, self._share_C[cells_B.clamp_min(0)], 0.0)

    def learn(self, drawn: Drawn, offered_N: torch.Tensor, taken_N: torch.Tensor) -> None:
        """
        Args:
            drawn: flat.
            offered_N, taken_N: float32, 0 to 1: how probable it was that all drafts before it were
                accepted, and that it was, too.
        """
        # Weights of 0 rather than a selection: the number of drafts would be a host value.
        there_N = (drawn.cells >= 0).float()
        cells_N = drawn.cells.clamp_min(0)
        q_NG = torch.lerp(drawn.heads.unsqueeze(1), drawn.memory.unsqueeze(1), self._shares_G)
        accepted_NG = (
            torch.minimum(drawn.p.unsqueeze(1), q_NG) * drawn.weight.unsqueeze(1)
        ).clamp_max(MOST_OVER)
        values_NX = torch.cat(
            [accepted_NG, offered_N.unsqueeze(1), taken_N.unsqueeze(1)], dim=1
        ) * there_N.unsqueeze(1)
        whole_CX = torch.zeros(
            len(self._seen_C), values_NX.shape[1], dtype=torch.int64, device=cells_N.device
        ).index_add_(0, cells_N, (values_NX.double() * UNIT).round().long())
        accepted_CG, both_C2 = (whole_CX.double() / UNIT).float().split([len(SHARES), 2], dim=1)
        self._accepted_CG += accepted_CG
        self._seen_C += both_C2[:, 0]
        self._offered_C += both_C2[:, 0]
        self._taken_C += both_C2[:, 1]
        # Sums of old drafts shrink once there are enough: heads and policy have moved since.
        fade_C = (MOST_SEEN / self._seen_C.clamp_min(MOST_SEEN)).clamp_max(1)
        self._seen_C *= fade_C
        self._accepted_CG *= fade_C.unsqueeze(1)
        # The further a w is from the first one, the more accepted drafts must speak for it.
        kept_CG = self._accepted_CG - PRIOR * (self._shares_G - self._first_C.unsqueeze(1)).abs()
        self._share_C = self._shares_G[kept_CG.argmax(1)].where(self._seen_C > 0, self._first_C)

    def by_length(self) -> list[tuple[float, float]]:
        """Drafts verified and accepted since the beginning, for each of LENGTHS."""
        both_C2 = torch.stack([self._offered_C, self._taken_C], dim=1)
        return [
            (offered, taken)
            for offered, taken in both_C2.view(len(LENGTHS), TOPS, 2).sum(1).tolist()
        ]


# ---- one step


class Waiting:
    """What is known of the drafts of each slot until they are verified: their cells, and q of the
    heads, of the memory and of both.
    """

    def __init__(self, slots: int, drafts: int, device: torch.device) -> None:
        self.q_KS3 = torch.zeros(drafts, slots, 3, device=device)
        self.cells_KS = torch.full((drafts, slots), -1, device=device)


class Recall:
    """What a batch recalls while a step's drafts are drawn, one after the other."""

    def __init__(
        self,
        texts_BX: torch.Tensor,
        weight_BP: torch.Tensor,
        tails_Bn: torch.Tensor,
        trust: Trust,
        slots_B: torch.Tensor,
        waiting: Waiting,
    ) -> None:
        self._texts_BX = texts_BX
        self._trust = trust
        self._slots_B = slots_B
        self._waiting = waiting
        # Empty places get the id 0, which is a valid index; their weight of 0 keeps them out.
        self._next_BP = self._columns_BP = texts_BX[:, SUFFIX:].clamp_min(0).long()
        self._weight_BP = weight_BP
        self._run_BP = match(texts_BX, tails_Bn)

    def among(self, ids_W: torch.Tensor, vocab_size: int) -> None:
        """Restrict drafts to these tokens."""
        place_V = torch.full((vocab_size,), -1, device=ids_W.device)
        place_V[ids_W] = torch.arange(len(ids_W), device=ids_W.device)
        columns_BP = place_V[self._next_BP]
        self._weight_BP = self._weight_BP * (columns_BP >= 0)
        self._columns_BP = columns_BP.clamp_min(0)

    def mix(self, mass_BW: torch.Tensor, on_B1: torch.Tensor) -> None:
        """Make the heads' q the mixture, where `on_B1`."""
        votes = vote(self._run_BP, self._weight_BP)
        self._share_BP = votes.share_BP
        self._cells_B = torch.where(on_B1.squeeze(1), cells_of(votes.length_B, mass_BW.amax(1)), -1)
        self._w_B1 = self._trust.share(self._cells_B).unsqueeze(1)
        whole_BP = (self._share_BP * UNIT).round().int()
        whole_BW = torch.zeros_like(mass_BW, dtype=torch.int32).scatter_add_(
            1, self._columns_BP, whole_BP
        )
        mass_BW.mul_(1 - self._w_B1).add_(whole_BW.float() * (self._w_B1 / UNIT))

    def follow(self, k: int, ids_B: torch.Tensor, q_B: torch.Tensor) -> None:
        """Draft k was drawn, with probability `q_B`: what is to be learned from it, and what the
        next one stands behind.
        """
        next_BP = self._texts_BX[:, SUFFIX:] == ids_B.int().unsqueeze(1)
        memory_B = (self._share_BP * next_BP).sum(1)
        w_B = self._w_B1.squeeze(1)
        # The heads' own q was overwritten by the mixture, so it is worked out of it. No w is 1
        # (SHARES), so nothing is divided by 0.
        heads_B = ((q_B - w_B * memory_B) / (1 - w_B)).clamp_min(0)
        self._waiting.q_KS3[k].index_copy_(
            0, self._slots_B, torch.stack([heads_B, memory_B, q_B], dim=1)
        )
        self._waiting.cells_KS[k].index_copy_(0, self._slots_B, self._cells_B)
        self._run_BP = advance(self._texts_BX, self._run_BP, ids_B)

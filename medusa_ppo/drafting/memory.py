"""A memory of earlier responses to the same prompt, as a second source of drafts.

The heads know the state, the memory knows the wording. Drafts are drawn from one mixture q = (1 -
w) q_heads + w q_memory. q_memory counts what followed suffixes of the text so far (including
drafts) wherever they occurred before, in finished or concurrent responses to the same prompt; the
longest suffix has the most weight. A table gives w by the length of that suffix and the confidence
of the heads; it is learned from acceptance. All of this is fixed before a draft is drawn, so q is
exact and verification stays lossless (docs/theory.md).

The contents of the texts are chosen on the host, between steps; lookup and mixing use tensors of
fixed shapes.

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
"""Length of the longest suffix that is distinguished, in tokens."""
# In replay, shorter suffixes with a quarter of the weight per missing token beat the longest suffix
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
LIGHT = 0.01
"""Responses with less than this share of the largest weight get only the room that others leave:
where these say something, the light ones have next to no votes.
"""
PLACES = 16_384
"""Maximum tokens of a text that are searched; newer responses come first."""
EMPTY, MISSING = -1, -2
"""The separator between responses of a text, and the padding before the first token of a short one.
They differ from every token, and from each other.
"""
# 128 bits, so that two prompts never get the same key by chance.
KEY_BYTES = 16
OVERHEAD = 256
"""Approximate bytes of a response besides its tokens."""
SHARES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
"""Possible values of w. Without 0 and 1: a source that never drafts can't be learned about."""
FIRST_SHARES = (0.6, 0.6, 0.5, 0.5, 0.3, 0.1)
"""Initial w, by bin of the heads' largest probability."""
PRIOR, MOST_SEEN = 3.0, 2000.0
"""Weight of the initial w, in accepted drafts, and the number of drafts after which older ones are
forgotten.
"""
MOST_OVER = 20.0
"""Limit on how much one draft counts for a w other than its own."""
UNIT = 1 << 30
"""Sums whose order is undefined (a GPU's atomic additions) use whole multiples of 1 / UNIT: with
different rounding, the ranks of an engine would draw different tokens.
"""


# ---- responses, on the host


def prompt_key(prompt: Sequence[int]) -> bytes:
    """A key that is the same for the same tokens."""
    return blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=KEY_BYTES).digest()


class _Said(NamedTuple):
    """A response, the version of the policy that began it, and its seed."""

    tokens: np.ndarray
    version: int
    seed: int | None


Row = tuple[str, int, int | None, list[int]]
"""A response sent to another memory: the prompt's key (hex), its age in versions of the policy, its
seed, its tokens.
"""
TOKENS, TABLE, KEYS, NOW, OF = "tokens", "table", "keys", "version", "of."
"""Names in a saved memory: all tokens; for each response its length, version, whether it has a
seed, that seed, and its prompt; the prompts' keys; the policy's version; and digests of what the
memory belongs to.
"""


class ResponseMemory:
    """Responses by prompt, within `most_bytes`; the least recently used prompt is dropped first,
    its oldest response first.

    Attributes:
        version: version of the policy now.
        nbytes: bytes in use.
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
        """Add a finished response to the prompt with this key; `version` is that of the policy that
        began it (None: the present one).
        """
        # A text has no room for more.
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
        """Add responses from another memory, or written by another engine."""
        for key, age, seed, tokens in rows:
            # Rows carry an age, not a version: each engine counts versions from its own start.
            self.remember(bytes.fromhex(key), tokens, self.version - age, seed)

    def rows(self) -> list[Row]:
        """Everything, in the order in which it would be dropped."""
        return [
            (key.hex(), self.version - one.version, one.seed, one.tokens.tolist())
            # This order lets `take` restore which responses are dropped first.
            for key, said in self._said.items()
            for one in said
        ]

    def state_dict(self, of: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
        """Everything as tensors. `of`: digests of what the memory belongs to."""
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
        """Replace the contents by a saved memory, as far as the budget allows.

        Raises:
            CheckpointError: it is damaged, or belongs to something else.
        """
        for name, digest in of.items():
            found = bytes(state.get(OF + name, torch.zeros(0, dtype=torch.uint8)).tolist())
            if found != digest:
                raise CheckpointError(
                    f"The saved responses belong to another {name}.",
                    given=f"{name} {found.hex()[:16] or 'unknown'}",
                    expected=f"{name} {digest.hex()[:16]}, that of this run",
                    do=(
                        f"Continue with the {name} that the run had, or without the memory:"
                        " engine.memory_bytes=null --allow engine.memory_bytes."
                    ),
                )
        tokens_T, table_R5, keys_P = (
            state.get(name, torch.zeros(0, dtype=torch.int64)) for name in (TOKENS, TABLE, KEYS)
        )
        # After these checks, splitting and looking up below can't raise an error of torch's own.
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
        """The responses to a prompt, newest first, in at most `places` tokens: tokens `X` (int32)
        and weights `P` (float32).

        A token that may not come next (a prompt's token, or a separator) has weight 0.

        Args:
            tail: the prompt's last tokens, put before each response.
            beside: the tokens so far of concurrent responses.
            seed: seed of the reader: what was drawn with the same random numbers is left out,
                because q may not depend on them.
        """
        room = self.room_beside(key, places)
        now = shown([(said, 1.0) for said in beside], tail, room)
        finished = self.finished(key, tail, places - len(now.weights), seed)
        return whole_text(now, finished)

    def room_beside(self, key: bytes, places: int) -> int:
        """Places of a text for concurrent responses, which must not crowd out finished ones."""
        return places // 2 if self._said.get(key) else places

    def has_of_seed(self, key: bytes, seed: int | None) -> bool:
        """Whether a response to this prompt was drawn with this seed."""
        return seed is not None and any(one.seed == seed for one in self._said.get(key, ()))

    def finished(
        self, key: bytes, tail: Sequence[int], room: int, seed: int | None = None
    ) -> Shown:
        """What a text shows of finished responses; see `text`."""
        said = self._said.get(key, [])
        if said:
            self._said.move_to_end(key)
        newest_first = [
            (one.tokens, FADE ** (self.version - one.version))
            for one in reversed(said)
            if seed is None or one.seed != seed
        ]
        # They differ most between epochs over the same prompts, and stay in order.
        least = LIGHT * max((weight for _, weight in newest_first), default=0.0)
        heavy = [response for response in newest_first if response[1] >= least]
        light = [response for response in newest_first if response[1] < least]
        first = shown(heavy, tail, room)
        rest = shown(light, tail, room - len(first.weights))
        return Shown(*map(np.concatenate, zip(first, rest, strict=True)))


class Shown(NamedTuple):
    """Responses one after the other: tokens (int32) and weights (float32) of the same length."""

    tokens: np.ndarray
    weights: np.ndarray


def shown(
    responses: Sequence[tuple[Sequence[int] | np.ndarray, float]], tail: Sequence[int], room: int
) -> Shown:
    """Responses with their weights, each behind the prompt's last tokens, in at most `room`
    tokens.
    """
    pieces: list[tuple[Sequence[int], np.ndarray, float]] = []
    left = room
    part = [(np.asarray(said, dtype=np.int32), weight) for said, weight in responses if len(said)]
    for number, (said, weight) in enumerate(part):
        piece = tail, said, weight
        if len(tail) + len(said) + 1 > left:
            # Only the last part of it. Each of the texts that follow gets as much room, so that
            # none crowds out the others.
            length = left // (len(part) - number)
            if length <= SUFFIX:
                break
            piece = (), said[1 - length :], weight
        pieces.append(piece)
        left -= len(piece[0]) + len(piece[1]) + 1
    tokens = np.full(room - left, EMPTY, dtype=np.int32)
    weights = np.zeros(room - left, dtype=np.float32)
    first = 0
    for before, said, weight in pieces:
        middle = first + len(before)
        last = middle + len(said)
        # The prompt's tail is context and has no votes.
        tokens[first:middle] = before
        tokens[middle:last] = said
        weights[middle:last] = weight
        # Without a separator, a suffix could begin in one response and end in the next.
        first = last + 1
    # vLLM has placeholders below 0.
    weights[tokens < 0] = 0.0
    return Shown(tokens, weights)


def whole_text(*parts: Shown) -> tuple[np.ndarray, np.ndarray]:
    """A text of these parts. It is SUFFIX tokens longer than its places, because `match` also looks
    back from the first one.
    """
    start = np.full(SUFFIX, EMPTY, dtype=np.int32)
    tokens, weights = zip(*parts, strict=True)
    return np.concatenate([start, *tokens]), np.concatenate(weights)


def tail_of(prompt: Sequence[int], said: Sequence[int] = ()) -> list[int]:
    """The last `SUFFIX` tokens of a prompt and its response; `MISSING` if there are fewer."""
    tail = [*prompt[-SUFFIX:], *said[-SUFFIX:]][-SUFFIX:]
    return [MISSING] * (SUFFIX - len(tail)) + tail


# ---- what followed a suffix


class Votes(NamedTuple):
    """What followed the suffixes of a text.

    Attributes:
        share_BP: float32, share of q_memory of each place of the text; all 0 if nothing matches.
        length_B: int64, length of the longest matching suffix; 0: none matches.
    """

    share_BP: torch.Tensor
    length_B: torch.Tensor


def match(texts_BX: torch.Tensor, tails_Bn: torch.Tensor) -> torch.Tensor:
    """How many tokens before each place match the tail, backwards from its last one: int32 `[B,
    P]`.
    """
    places = texts_BX.shape[1] - SUFFIX
    alike_BP = torch.ones(texts_BX.shape[0], places, dtype=torch.bool, device=texts_BX.device)
    run_BP = torch.zeros(alike_BP.shape, dtype=torch.int32, device=texts_BX.device)
    for back in range(1, SUFFIX + 1):
        # Only an unbroken run counts: after a differing token, earlier ones add nothing.
        alike_BP &= texts_BX[:, SUFFIX - back : SUFFIX - back + places] == tails_Bn[
            :, -back
        ].unsqueeze(1)
        run_BP += alike_BP
    return run_BP


def advance(texts_BX: torch.Tensor, run_BP: torch.Tensor, ids_B: torch.Tensor) -> torch.Tensor:
    """Update `match` by one more token."""
    # A place's run extends that of the previous place; a full search for each draft would take
    # SUFFIX comparisons.
    longer_BP = torch.nn.functional.pad(run_BP[:, :-1], (1, 0)) + 1
    return longer_BP.clamp_max_(SUFFIX) * (texts_BX[:, SUFFIX - 1 : -1] == ids_B.int().unsqueeze(1))


def vote(run_BP: torch.Tensor, weight_BP: torch.Tensor) -> Votes:
    """Weighted counts of what followed each suffix, by the suffix's length."""
    run_BP = run_BP * (weight_BP > 0)
    length_B = run_BP.amax(1)
    # Weights relative to the longest suffix give the same shares and can't overflow.
    near_BP = (run_BP - length_B.unsqueeze(1)).float().mul_(math.log2(NEARER)).exp2_()
    voting_BP = near_BP.mul_(weight_BP).mul_(run_BP > 0)
    # If nothing matches, the sum is 0; the shares must then be 0, not NaN.
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
    """Tokens with their probabilities in both sources, in any one shape.

    Attributes:
        cells: int64, -1: the memory was not used.
        heads, memory: float32, q of each source.
        p: float32, the policy's probability times the weight w of the earlier drafts
            (`drafting.verify`): block verification accepts the part of q that is below it.
        weight: float32, 1 / (probability with which each token was drawn); 0: it does not count.
    """

    cells: torch.Tensor
    heads: torch.Tensor
    memory: torch.Tensor
    p: torch.Tensor
    weight: torch.Tensor


class Trust:
    """The memory's share w of a draft's q, by cell: the w with which most drafts would have been
    accepted.

    For any w the chance of acceptance is the sum over tokens of min(p, q). So a token drawn with
    probability c contributes min(p, q) / c to its estimate, for every w at once, whichever one was
    used.
    """

    def __init__(self, device: torch.device) -> None:
        self._shares_G = torch.tensor(SHARES, device=device)
        self._first_C = torch.tensor(FIRST_SHARES, device=device).repeat(len(LENGTHS))
        self._accepted_CG = torch.zeros(len(self._first_C), len(SHARES), device=device)
        self._seen_C, self._offered_C, self._taken_C = (
            torch.zeros_like(self._first_C) for _ in range(3)
        )
        self._share_C = self._first_C

    def renew(self) -> None:
        """Restore the initial state at the same addresses, after the memory was thrown away."""
        new = Trust(self._first_C.device)
        self._shares_G.copy_(new._shares_G)
        self._first_C.copy_(new._first_C)
        for sums in (self._accepted_CG, self._seen_C, self._offered_C, self._taken_C):
            sums.zero_()
        self._share_C = self._first_C

    def share(self, cells_B: torch.Tensor) -> torch.Tensor:
        """w of each cell; 0 without one."""
        return torch.where(cells_B >= 0, self._share_C[cells_B.clamp_min(0)], 0.0)

    def learn(self, drawn: Drawn, offered_N: torch.Tensor, taken_N: torch.Tensor) -> None:
        """
        Args:
            drawn: flat.
            offered_N, taken_N: float32, 0 to 1: the probability that all earlier drafts are
                accepted, and that this one is accepted too.
        """
        # Drafts that don't count get weight 0: selecting the others would need their number on the
        # host.
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
        # Old sums shrink once there are enough, because heads and policy change.
        fade_C = (MOST_SEEN / self._seen_C.clamp_min(MOST_SEEN)).clamp_max(1)
        self._seen_C *= fade_C
        self._accepted_CG *= fade_C.unsqueeze(1)
        # The further a w is from the initial one, the more accepted drafts must support it.
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
    """What is stored about the drafts of each slot until they are verified: their cells, and q of
    the heads, of the memory and of the mixture.
    """

    def __init__(self, slots: int, drafts: int, device: torch.device) -> None:
        self.q_KS3 = torch.zeros(drafts, slots, 3, device=device)
        self.cells_KS = torch.full((drafts, slots), -1, device=device)

    def renew(self) -> None:
        """Restore the initial state at the same addresses, after the memory was thrown away."""
        self.q_KS3.zero_()
        self.cells_KS.fill_(-1)


class Recall:
    """What the memory suggests for a batch while a step's drafts are drawn, one after the other."""

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
        """Replace the heads' q by the mixture where `on_B1` is true."""
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
        """Draft k was drawn, with probability `q_B`: store what can be learned from it, and extend
        the text for the next draft.
        """
        next_BP = self._texts_BX[:, SUFFIX:] == ids_B.int().unsqueeze(1)
        memory_B = (self._share_BP * next_BP).sum(1)
        w_B = self._w_B1.squeeze(1)
        # The mixture has overwritten the heads' own q, so it is computed back. No w is 1 (SHARES),
        # so the division is safe.
        heads_B = ((q_B - w_B * memory_B) / (1 - w_B)).clamp_min(0)
        self._waiting.q_KS3[k].index_copy_(
            0, self._slots_B, torch.stack([heads_B, memory_B, q_B], dim=1)
        )
        self._waiting.cells_KS[k].index_copy_(0, self._slots_B, self._cells_B)
        self._run_BP = advance(self._texts_BX, self._run_BP, ids_B)

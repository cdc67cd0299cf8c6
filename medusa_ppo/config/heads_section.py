"""The section `heads`: the heads that a run starts with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from heads.heads_config import HeadsConfig
from medusa_ppo.config.section import Count, Section, Text


class HeadsSection(Section):
    """The heads that a run starts with."""

    path: Text | None = None
    """Folder of heads that the run starts with (saved by a run, or by `medusa-ppo train`); null:
    new heads, each of which starts as a copy of lm_head. Set it when you have heads for this actor:
    drafts then pay from the first step.
    """
    kind: Literal["medusa", "hydra"] = "hydra"
    """What a head reads: the hidden state alone (`medusa`), or also every token sampled or drafted
    since (`hydra`), which raises acceptance. Set it to medusa only to export the heads to programs
    that support nothing else.
    """
    num_heads: Count = 4
    """K, the number of heads, which is the maximum number of drafts in a step. Set it higher when
    the mean acceptance length is near K + 1, lower when the last heads' drafts are rarely accepted.
    """
    context: int = Field(16, ge=0)
    """Number of last positions of the response that heads of kind `hydra` attend to, besides their
    own state; 0: none. Set it higher when responses repeat text from further back; each position
    costs time in every drafting call.
    """
    context_layers: Count = 1
    """Attention layers over these positions. Set it to 2 when the actor is so large that drafting
    costs almost nothing: acceptance rises a little.
    """
    feed_forward: int = Field(2, ge=0)
    """Inner width of the feed-forward layer after each of these attention layers, in multiples of
    the hidden size; 0: none. Set it to 0 when drafting takes too large a part of a step.
    """
    cell: Count = 3
    """Width of the state that heads of kind `hydra` pass from draft to draft, in multiples of the
    hidden size. Set it lower when drafting takes too large a part of a step, or when the heads take
    too much memory.
    """
    copy_parts: int = Field(4, ge=0)
    """Parts of the attention that copies what followed the last tokens elsewhere in the prompt and
    the response; 0: no copying. More parts find more kinds of matches. Set it to 0 when responses
    never repeat anything from their prompt.
    """
    lm_head: Literal["shared", "own"] = "shared"
    """`shared`: the actor's lm_head, frozen; `own`: a trainable lm_head for each head, as large as
    the actor's. Set it to own only for programs that expect such heads.
    """
    warm_up_tokens: int = Field(12_288, ge=0)
    """Tokens of responses to the run's first prompts that the engine writes before step 0. The
    heads are trained on them until their acceptance on held-out prompts stops rising, and step 0
    drafts with them. No effect if `path` is set. Set it to 0 for runs of a few steps.
    """
    warm_up_s: float = Field(300.0, gt=0)
    """Maximum seconds that the warm-up takes, half of them for writing. Set it lower when a run's
    first step must not wait so long.
    """

    def sizes(self, hidden: int, vocab: int) -> HeadsConfig:
        """Configuration of new heads for an actor of this width and vocabulary."""
        if self.kind != "hydra" or not self.context:
            return HeadsConfig(hidden, vocab, self.num_heads, self.kind, lm_head=self.lm_head)
        return HeadsConfig(
            hidden,
            vocab,
            self.num_heads,
            self.kind,
            lm_head=self.lm_head,
            mlp_ratio=self.cell,
            context=self.context,
            context_layers=self.context_layers,
            feed_forward=self.feed_forward,
            copy_parts=self.copy_parts,
        )

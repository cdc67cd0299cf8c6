"""The section `data`: where prompts and reference answers come from."""

from __future__ import annotations

from medusa_ppo.config.section import Count, Section, Text


class DataConfig(Section):
    """Where prompts and reference answers come from."""

    path: Text = "demo"
    """Local JSONL, Parquet, CSV or text file, or a hub name; `demo` is the generated arithmetic
    task.
    """
    split: Text = "train"
    """Split of a hub dataset; `train[:1000]` takes the first thousand rows, of a file as well."""
    template: Text = "{prompt}"
    """The prompt, with the row's fields in braces, e.g. 'Question: {question}\\nAnswer:'."""
    answer_column: Text | None = "answer"
    """Column with the reference answer that the reward reads; null: none. A reward model reads
    none, so a missing column is none then.
    """
    images: Text | None = None
    """Column with each row's image, or a list of them: paths (from the data file's folder), or
    files' bytes as `datasets` has them. For a vision-language actor; the template's text is then a
    user's message in the model's chat template. null: none.
    """
    max_prompt_tokens: Count = 256
    """Longer prompts are left out and counted; an image's tokens count too."""
    eval_path: Text | None = None
    """Where the prompts of the evaluation come from, as `path`; null: the same."""
    eval_split: Text = "test"
    """Split of the evaluation (with ppo.eval_every)."""
    ptx_path: Text | None = None
    """Texts to go on learning by heart beside PPO (with ppo.ptx_coefficient): a column `text`, or a
    text file; null: none.
    """

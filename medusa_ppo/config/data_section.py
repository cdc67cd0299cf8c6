"""The section `data`: where prompts and reference answers come from."""

from __future__ import annotations

from medusa_ppo.config.section import Count, Section, Text


class DataConfig(Section):
    """Where prompts and reference answers come from."""

    path: Text = "demo"
    """The prompts: a JSONL, Parquet, CSV or text file, or a hub name (`NAME:SUBSET` for one with
    subsets). `demo` is generated arithmetic. Set it to your data.
    """
    split: Text = "train"
    """Split of a hub dataset. `train[:1000]` takes the first thousand rows, of a file as well. Set
    it when the rows have another split, or to try a run on few of them.
    """
    template: Text = "{prompt}"
    """How a row becomes a prompt: a text with the row's columns in braces, e.g.
    'Question: {question}\\nAnswer:'. Set it when the rows have no column `prompt`, or when the
    actor expects words around the question.
    """
    answer_column: Text | None = "answer"
    """Column with the reference answer that the reward function gets; null: none. A reward model
    reads no answer, so the column may be missing then. Set it when your column has another name, or
    to null when your reward function needs no answer.
    """
    images: Text | None = None
    """Column with each row's image, or a list of them: paths (from the data file's folder), or
    files' bytes as `datasets` has them; null: none. The template's text is then a user's message in
    the model's chat template. Set it for a vision-language actor.
    """
    max_prompt_tokens: Count = 256
    """Longest prompt, in tokens, those of its images included; longer prompts are left out and
    counted. Set it when the run says that it left prompts out.
    """
    eval_path: Text | None = None
    """Prompts of the evaluation, written as `path`; null: those of `path`. Set it when you evaluate
    (ppo.eval_every) on a file of its own.
    """
    eval_split: Text = "test"
    """Split of the evaluation's prompts (ppo.eval_every). Set it when yours has another name, e.g.
    `validation`.
    """
    ptx_path: Text | None = None
    """Texts that the actor goes on learning by heart beside PPO, weighed by ppo.ptx_coefficient: a
    dataset with a column `text`, or a text file; null: none. Set it when the actor forgets things
    that the reward does not ask for.
    """

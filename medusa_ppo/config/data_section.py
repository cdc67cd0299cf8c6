"""The section `data`: where prompts and reference answers come from."""

from __future__ import annotations

from medusa_ppo.config.section import Count, Section, Text

EMBEDDED_DATA = "demo"
"""Name of the embedded task, whose rows are generated."""


class DataConfig(Section):
    """Where prompts and reference answers come from."""

    path: Text = EMBEDDED_DATA
    """The prompts: a JSONL, Parquet, CSV or text file, or a hub name (`NAME:SUBSET` for one with
    subsets; its split is `split`, not part of the name). `demo` is generated arithmetic. Set it to
    your data.
    """
    split: Text = "train"
    """Split of a hub dataset. `train[:1000]` takes the first thousand rows, and works for files
    too. Set it when your rows are in another split, or to try a run on a few of them.
    """
    template: Text = "{prompt}"
    """How a row becomes a prompt: a text with the row's columns in braces, e.g.
    'Question: {question}\\nAnswer:'. Set it when the rows have no column `prompt`, or when the
    actor expects text around the question.
    """
    answer_column: Text | None = "answer"
    """Column with the reference answer that the reward function gets; null: none. A reward model
    needs no answer, so the column may then be missing. Set it when your column has a different
    name, or to null when your reward function needs no answer.
    """
    images: Text | None = None
    """Column with each row's image, or a list of them: paths (relative to the data file's folder),
    or images as `datasets` loads them; null: none. The template's text is then a user message in
    the model's chat template. Set it for a vision-language actor.
    """
    max_prompt_tokens: Count = 256
    """Longest prompt, in tokens, including those of its images; longer prompts are left out and
    counted. Set it higher when the run reports that it left prompts out.
    """
    eval_path: Text | None = None
    """Prompts of the evaluation, in the same form as `path`; null: those of `path`. Set it when you
    evaluate (ppo.eval_every) on a separate file.
    """
    eval_split: Text = "test"
    """Split of the evaluation's prompts (ppo.eval_every). Set it when yours has another name, e.g.
    `validation`.
    """
    ptx_path: Text | None = None
    """Texts that the actor also trains on during PPO, weighted by ppo.ptx_coefficient: a dataset
    with a column `text` (`NAME@SPLIT` for another split than `train`), or a text file; null: none.
    Set it when the actor forgets things that the reward does not ask for.
    """

"""How hypothesis draws the cases of fuzz.py: mostly sound files and answers in which something is
not.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from medusa_ppo.config.run_config import known_keys
from medusa_ppo.contract import metrics

Strategy = st.SearchStrategy[Any]

WORDS = st.sampled_from(
    [
        "",
        "null",
        "nan",
        "1e400",
        "-1",
        "{a}",
        "{",
        "<script>alert(1)</script>",
        "../x",
        "\0",
        "9" * 5000,
        "*a",
        "~",
        "a" * 3000,
    ]
)
WHOLE = st.integers(-3, 20) | st.sampled_from([2**31, -(2**63), 2**64, 10**400])
SCALAR = st.none() | st.booleans() | WHOLE | st.floats() | st.text(max_size=8) | WORDS
TREE = st.recursive(
    SCALAR,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
DEEP = st.integers(1, 3000).map(lambda depth: "[" * depth + "]" * depth)
PLACE = st.integers(0, 1 << 16)
BYTE = st.integers(0, 255)
DAMAGE = st.lists(
    st.tuples(PLACE).map(list)
    | st.tuples(PLACE, BYTE).map(list)
    | st.tuples(PLACE, st.integers(1, 64), st.integers(1, 50)).map(list),
    max_size=4,
)
"""Changes of bytes, as `fuzz.damaged` makes them."""
KEYS = known_keys()
STOCK = [
    "model_type",
    "architectures",
    "hidden_size",
    "vocab_size",
    "num_heads",
    "num_hidden_layers",
    "medusa_fc_bias",
]


def changes(keys: list[str]) -> Strategy:
    """Pairs for `changed`."""
    return st.lists(
        st.tuples(st.sampled_from(keys) | st.text(max_size=8), TREE | st.just("REMOVE")).map(list),
        max_size=4,
    )


def mapping(pairs: list[list[Any]]) -> dict[str, Any]:
    """A mapping that `fuzz.whole` makes of them."""
    return {"set": pairs}


def strategies() -> dict[str, Strategy]:
    """One for each target."""
    run = _run()
    rows = st.lists(
        st.dictionaries(st.sampled_from(["prompt", "answer", "q"]), TREE, max_size=3), max_size=3
    )
    template = st.text(alphabet="{}[].!:0apromt \n", max_size=20)
    template |= st.sampled_from(
        ["{prompt}", "{prompt:>9999999999}", "{answer!r:d}", "{q.__class__}", "{prompt:{answer}}"]
    )
    lines = st.text(max_size=80) | rows.map(lambda found: "\n".join(map(json.dumps, found))) | DEEP
    state = [
        "format_version",
        "version",
        "next_step",
        "policy_version",
        "wall_s",
        "config",
        *(f"config.{key}" for key in KEYS),
    ]
    return {
        "config": _config(),
        **_files(),
        "metrics": run,
        "report": run,
        "resume": st.fixed_dictionaries(
            {"set": changes(state), "text": st.none() | st.none() | st.text(max_size=9) | DEEP}
        ),
        "http": _http(),
        "rows": st.fixed_dictionaries(
            {"rows": rows, "template": template, "column": st.just("prompt") | st.text(max_size=6)}
        ),
        "data_file": st.fixed_dictionaries(
            {
                "ending": st.sampled_from([".jsonl", ".json", ".csv", ".txt", ".parquet"]),
                "text": lines,
            }
        ),
        "loop": _loop(),
    }


def _config() -> Strategy:
    text = st.text(alphabet="abc: -[]{}&*!<>|?%@'\"\n\t,#~.019é\0", max_size=60) | DEEP
    tags = [
        "a: !!int x",
        "a: !!float x",
        "a: 2020-19-39",
        "a: !!timestamp x",
        "? [a]\n: b",
        "a: !!python/name:os.system",
        "&a [*a]",
        "extends: 3",
    ]
    aliases = "a0: &a0 [x]\n" + "\n".join(
        f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 40)
    )
    nested = st.lists(st.tuples(st.sampled_from(KEYS), TREE).map(list), max_size=4).map(mapping)
    key = st.sampled_from(KEYS) | st.text(max_size=8)
    override = st.tuples(key, st.sampled_from(["=", "", "=="]), text | WORDS).map("".join)
    raw = st.none() | st.none() | text | st.sampled_from([*tags, aliases])
    return st.fixed_dictionaries(
        {"text": raw, "values": nested | TREE, "overrides": st.lists(override, max_size=2)}
    )


def _files() -> dict[str, Strategy]:
    header = [
        f"{name}{part}"
        for name in ("0.0.linear.weight", "0.1.weight", "x")
        for part in ("", "/dtype", "/shape", "/data_offsets")
    ]
    own = [
        f"medusa_ppo.{name}"
        for name in (
            "format_version",
            "version",
            "checksum",
            "dtype",
            "lm_head_checksum",
            "metadata",
            "heads",
        )
    ]
    fields = (
        "hidden_size",
        "vocab_size",
        "num_heads",
        "kind",
        "num_layers",
        "lm_head",
        "rank",
        "mlp_ratio",
    )
    sizes = [f"medusa_ppo.heads.{name}" for name in fields]
    names = st.builds(
        lambda prefix, k, layer, rest: f"{prefix}{k}.{layer}{rest}",
        st.sampled_from(["", "medusa_head.", "medusa_heads.", "blocks.", "lm_heads."]),
        st.integers(0, 3) | st.just(10**9),
        st.sampled_from(["0", "1", "2", "layers.0", "layers.999999999"]),
        st.sampled_from([".linear.weight", ".linear.bias", ".weight", ".bias", ""]),
    )
    names |= st.sampled_from(["lm_head.weight", "model.embed_tokens.weight", "", "a" * 2000])
    claims = [
        "medusa_num_heads",
        "medusa_num_layers",
        "tie_word_embeddings",
        "text_config",
        "base_model_name_or_path",
    ]
    folder = {
        "file": st.sampled_from(["medusa_lm_head.safetensors", "model.safetensors"]),
        "tensors": st.lists(
            st.tuples(names, st.lists(st.integers(0, 9), max_size=3)).map(list),
            max_size=6,
            unique_by=lambda pair: pair[0],
        ),
        "config": changes([*STOCK, *claims]).map(mapping),
    }
    damage = st.dictionaries(
        st.sampled_from(["config.json", "model.safetensors"]), DAMAGE, max_size=2
    )
    return {
        "heads": st.fixed_dictionaries({"set": changes([*own, *sizes, *STOCK]), "damage": damage}),
        "state": st.fixed_dictionaries(
            {"set": changes([*header, "__metadata__"]), "damage": DAMAGE}
        ),
        "pt": st.fixed_dictionaries({"pickle": DAMAGE, "damage": st.just([]) | DAMAGE}),
        "foreign": st.fixed_dictionaries(folder),
    }


def _run() -> Strategy:
    names = [
        value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)
    ]
    figures = st.dictionaries(st.sampled_from(names), TREE, max_size=5)
    line = st.builds(lambda found, step: {**found, metrics.STEP: step}, figures, WHOLE | TREE)
    keys = [
        "status",
        "started_at",
        "finished_at",
        "config",
        "versions",
        "hardware",
        "hardware.gpus",
        "process",
        "extras",
        "resumed",
    ]
    keys += [
        "comparison",
        "process.pid",
        "process.host",
        "config.ppo",
        "command",
        "commit",
        "actor_note",
        "name",
    ]
    meta = changes(keys).map(mapping) | TREE | st.text(max_size=9)
    return st.fixed_dictionaries(
        {
            "lines": st.lists(line | line | TREE | st.text(max_size=20) | DEEP, max_size=6),
            "meta": meta,
        }
    )


def _http() -> Strategy:
    label = st.sampled_from(
        ["", '{position="1"}', '{position="x"}', '{position="99999999999"}', '{position="-1"}', "{"]
    )
    number = st.sampled_from(["1", "-1", "NaN", "+Inf", "x", "1e400", ""])
    name = st.sampled_from(["drafts_total", "accepted_tokens_per_pos_total"])
    counter = st.builds(
        lambda name, tag, value: f"vllm:spec_decode_num_{name}{tag} {value}\n", name, label, number
    )
    logprobs = st.fixed_dictionaries({"token_logprobs": st.lists(SCALAR, max_size=6)}) | TREE
    choice = st.fixed_dictionaries(
        {},
        optional={
            "token_ids": st.lists(WHOLE, max_size=6) | TREE,
            "finish_reason": TREE,
            "logprobs": logprobs,
        },
    )
    fault = st.fixed_dictionaries(
        {"error": TREE | st.dictionaries(st.sampled_from(["kind", "problem", "given", "do"]), TREE)}
    )
    said = [
        "heads",
        "actor",
        "heads_version",
        "version",
        "checksum",
        "seconds",
        "max_drafts",
        "kind",
        "drafter",
    ]
    figures = st.dictionaries(st.sampled_from(said), TREE)
    bodies: dict[str, Strategy] = {
        "/v1/completions": st.fixed_dictionaries({"choices": st.lists(choice, max_size=2)}),
        "/collective_rpc": st.fixed_dictionaries(
            {"results": st.lists(figures | fault | TREE, max_size=2)}
        ),
        "/metrics": st.lists(counter, max_size=5).map("".join),
        "/v1/models": st.fixed_dictionaries({"data": TREE}),
    }
    status = st.just(200) | st.just(200) | st.sampled_from([0, 204, 299, 301, 401, 404, 500, 599])
    answers = {
        path: st.tuples(status, body | body | TREE | st.text(max_size=30) | DEEP).map(list)
        for path, body in bodies.items()
    }
    return st.fixed_dictionaries({"answers": st.fixed_dictionaries(answers)})


def _loop() -> Strategy:
    ids = st.integers(0, 3)
    ragged = st.lists(st.lists(ids, max_size=5), max_size=5)
    logprobs = st.lists(st.lists(st.none() | st.floats(), max_size=5), max_size=5)
    size = st.tuples(st.integers(0, 3), st.integers(0, 6))
    square = size.flatmap(
        lambda s: st.lists(
            st.lists(ids, min_size=s[1], max_size=s[1]), min_size=s[0], max_size=s[0]
        )
    )
    rows = {"prompts": ragged, "completions": ragged, "logprobs": logprobs}
    return st.fixed_dictionaries({**rows, "ids": square, "mask": square, "positions": square})

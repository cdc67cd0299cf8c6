"""`medusa-ppo convert`: every pair of formats that can hold the heads, bit for bit, and every known
trap of the formats by name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.checkpoint import load_heads, load_lm_head, save_heads
from heads.errors import CheckpointError, ConfigError, MedusaError, ModelError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.offline.convert import convert, open_base_model
from medusa_ppo.offline.formats import FORMATS, PlainHeads, representable_formats

D, V, K = 16, 40, 3


def plain(
    lm_head: str = "shared",
    layers: int = 1,
    bias: bool = False,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PlainHeads:
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors: dict[str, torch.Tensor] = {}
    for k in range(K):
        for layer in range(layers):
            repeat = tied and layer
            tensors[f"blocks.{k}.layers.{layer}.weight"] = (
                tensors[f"blocks.{k}.layers.0.weight"] if repeat else values(D, D)
            )
            if bias:
                tensors[f"blocks.{k}.layers.{layer}.bias"] = (
                    tensors[f"blocks.{k}.layers.0.bias"] if repeat else values(D)
                )
        if lm_head == "own":
            tensors[f"lm_heads.{k}.weight"] = values(V, D)
    return PlainHeads(HeadsConfig(D, V, K, "medusa", layers, lm_head), tensors, base_lm_head())


def base_lm_head() -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(3))


VARIANTS: dict[str, Callable[[], PlainHeads]] = {
    "shared": plain,
    "own": lambda: plain("own"),
    "shared, bfloat16": lambda: plain(dtype=torch.bfloat16),
    "own, 2 layers": lambda: plain("own", layers=2),
    "shared, 2 layers": lambda: plain(layers=2),
    "own, 2 tied layers": lambda: plain("own", layers=2, tied=True),
    "own, biases": lambda: plain("own", bias=True),
    "shared, biases": lambda: plain(bias=True),
    "own, 2 tied layers, biases": lambda: plain("own", layers=2, bias=True, tied=True),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model folder as transformers writes it, with a tokenizer file beside."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": D,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, **sizes))
    with torch.no_grad():
        model.lm_head.weight.copy_(base_lm_head())
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def written(heads: PlainHeads, folder: Path, base: Path) -> Path:
    """The heads in a first format that can hold them: native where there are no biases, else
    vllm.
    """
    if not heads.biased:
        module = MedusaHeads(heads.config).to(heads.dtype)
        module.load_trainable_state(heads.tensors)
        save_heads(
            folder / "native",
            module,
            lm_head_VD=heads.lm_head_VD,
            version=5,
            metadata={"options": {"model": "org/base"}},
        )
        return folder / "native"
    first = folder / "first"
    first.mkdir()
    own = heads.config.lm_head == "own"
    save_file(
        {k: v.clone() for k, v in heads.tensors.items()}
        | ({} if own else {"lm_head.weight": base_lm_head()}),
        first / "model.safetensors",
    )
    config = {
        "model_type": "medusa",
        "num_heads": K,
        "num_hidden_layers": heads.config.num_layers,
        "hidden_size": D,
        "vocab_size": V,
    }
    (first / "config.json").write_text(
        json.dumps(config | {"original_lm_head": not own, "medusa_fc_bias": True})
    )
    return first


def content(folder: Path) -> dict[str, Any]:
    """Every tensor of a folder by file and name, and its configuration without our own section's
    checksum-bearing parts.
    """
    tensors: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            tensors.update({f"{path.name}:{k}": v for k, v in load_file(path).items()})
        if path.suffix == ".pt":
            tensors.update(
                {f"{path.name}:{k}": v for k, v in torch.load(path, weights_only=True).items()}
            )
    config = json.loads((folder / "config.json").read_text())
    config.get("medusa_ppo", {}).pop("metadata", None)
    config.get("medusa_ppo", {}).pop("version", None)
    return {**tensors, "config": config}


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == second[name].dtype and torch.equal(value, second[name]), name
        else:
            assert value == second[name], name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_round_trip_is_bit_equal(variant: str, tmp_path: Path, base: Path) -> None:
    """A -> B -> A for every ordered pair of formats that can hold the heads: same files, names,
    dtypes, bits and configuration.
    """
    heads = VARIANTS[variant]()
    source = written(heads, tmp_path, base)
    formats = representable_formats(heads)
    assert len(formats) >= 3
    for name in formats:
        convert(source, tmp_path / name / "a", name, str(base))
    for first, second in itertools.permutations(formats, 2):
        there = tmp_path / first / f"to-{second}"
        back = tmp_path / first / f"back-from-{second}"
        convert(tmp_path / first / "a", there, second, str(base))
        convert(there, back, first, str(base))
        assert_same(content(tmp_path / first / "a"), content(back))
        assert_same(content(tmp_path / second / "a"), content(there))


def test_which_variant_fits_which_format() -> None:
    fits = {name: set(representable_formats(make())) for name, make in VARIANTS.items()}
    everything = set(FORMATS)
    assert fits["shared"] == everything
    assert fits["own"] == everything
    assert fits["own, biases"] == everything - {"native"}
    assert fits["shared, biases"] == everything - {"native"}
    assert fits["own, 2 layers"] == everything - {"fasterdecoding", "medusa-1.0"}
    assert fits["own, 2 tied layers"] == everything


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_computes_what_was_read(variant: str, tmp_path: Path, base: Path) -> None:
    """Each written file, loaded strictly into modules as its format's own code builds them, against
    the formula on what was given.
    """
    heads = VARIANTS[variant]()
    source = written(heads, tmp_path, base)
    h_ND = torch.randn(5, D, generator=torch.Generator().manual_seed(1)).to(heads.dtype)
    expected = [formula(heads, k, h_ND) for k in range(K)]
    for name, prefix in (
        ("fasterdecoding", ""),
        ("medusa-1.0", "medusa_head."),
        ("modelopt", "medusa_heads."),
    ):
        if name not in representable_formats(heads):
            continue
        folder = tmp_path / "out" / name
        convert(source, folder, name, str(base))
        named = {key.split(":")[-1]: value for key, value in content(folder).items()}
        state = {
            key.removeprefix(prefix): value
            for key, value in named.items()
            if key.removeprefix(prefix)[0].isdigit()
        }
        repeated = name in ("fasterdecoding", "medusa-1.0")
        module = original_heads(K, heads.config.num_layers, repeated=repeated).to(heads.dtype)
        module.load_state_dict(state)
        for k in range(K):
            assert torch.equal(module[k](h_ND), expected[k]), name


def formula(heads: PlainHeads, k: int, h_ND: torch.Tensor) -> torch.Tensor:
    f_ND = h_ND
    for layer in range(heads.config.num_layers):
        bias_D = heads.tensors.get(
            f"blocks.{k}.layers.{layer}.bias", torch.zeros(D, dtype=heads.dtype)
        )
        f_ND = f_ND + torch.nn.functional.silu(
            torch.nn.functional.linear(
                f_ND, heads.tensors[f"blocks.{k}.layers.{layer}.weight"], bias_D
            )
        )
    own = heads.tensors.get(f"lm_heads.{k}.weight")
    return f_ND @ (base_lm_head().to(heads.dtype) if own is None else own).T


# ---- traps, each by name


class Residual(torch.nn.Module):
    """The block that the numbered formats save: a Linear with a bias under the name `linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(D, D)

    def forward(self, f_ND: torch.Tensor) -> torch.Tensor:
        return f_ND + torch.nn.functional.silu(self.linear(f_ND))


def original_heads(
    heads: int = 5, layers: int = 1, own: bool = True, repeated: bool = True
) -> torch.nn.ModuleList:
    """Heads as the original code builds them: a head's layers are one module, repeated in a list.
    Others build as many as there are.
    """
    torch.manual_seed(0)
    ends = [[torch.nn.Linear(D, V, bias=False)] if own else [] for _ in range(heads)]
    blocks = [
        [Residual()] * layers if repeated else [Residual() for _ in range(layers)]
        for _ in range(heads)
    ]
    return torch.nn.ModuleList(
        [torch.nn.Sequential(*block, *end) for block, end in zip(blocks, ends, strict=True)]
    )


def fasterdecoding(folder: Path, module: torch.nn.ModuleList, **config: Any) -> Path:
    folder.mkdir()
    torch.save(module.state_dict(), folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(
        json.dumps({"medusa_num_heads": len(module), "medusa_num_layers": 1} | config)
    )
    return folder


def medusa_1_0(folder: Path, state: dict[str, torch.Tensor], **config: Any) -> Path:
    """The heads of a whole model, with nothing of the base model beside them."""
    folder.mkdir()
    save_file(
        {f"medusa_head.{name}": tensor.clone() for name, tensor in state.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return folder


def test_trap_the_uploaded_config_says_two_heads_and_there_are_five(tmp_path: Path) -> None:
    source = fasterdecoding(
        tmp_path / "a",
        original_heads(5),
        medusa_num_heads=2,
        base_model_name_or_path="lmsys/vicuna-7b-v1.3",
    )
    done = convert(source, tmp_path / "b", "vllm")
    assert done.config.num_heads == 5 and any("says 2 heads" in note for note in done.notes)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["num_heads"] == 5
    convert(source, tmp_path / "c", "fasterdecoding")
    written = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (written["medusa_num_heads"], written["base_model_name_or_path"]) == (
        5,
        "lmsys/vicuna-7b-v1.3",
    )


def test_trap_no_vocabulary_in_the_config(tmp_path: Path, base: Path) -> None:
    """With own lm_heads the tensors say it; without, only the model can."""
    assert (
        convert(
            fasterdecoding(tmp_path / "a", original_heads()), tmp_path / "b", "vllm"
        ).config.vocab_size
        == V
    )
    source = medusa_1_0(tmp_path / "no-lm-heads", original_heads(own=False).state_dict())
    with pytest.raises(CheckpointError, match="size of the vocabulary is unknown"):
        convert(source, tmp_path / "c", "vllm")
    assert convert(source, tmp_path / "c", "vllm", str(base)).config.vocab_size == V


def test_trap_tied_layers(tmp_path: Path) -> None:
    """List repetition: both names are in the file, on one storage. They become two equal layers,
    and go back where that is built.
    """
    module = original_heads(2, layers=2)
    source = fasterdecoding(tmp_path / "a", module, medusa_num_layers=2)
    done = convert(source, tmp_path / "b", "vllm")
    state = load_file(tmp_path / "b" / "model.safetensors")
    assert done.config.num_layers == 2
    assert torch.equal(state["blocks.1.layers.0.weight"], state["blocks.1.layers.1.weight"])
    assert torch.equal(state["blocks.1.layers.1.weight"], module[1][0].linear.weight)
    convert(tmp_path / "b", tmp_path / "c", "fasterdecoding")


def test_trap_tied_layers_of_which_safetensors_kept_one(tmp_path: Path) -> None:
    module = original_heads(2, layers=2)
    state = {
        name: tensor.clone()
        for name, tensor in module.state_dict().items()
        if ".1.linear" not in name
    }
    source = medusa_1_0(tmp_path / "a", state, medusa_num_heads=2, medusa_num_layers=2)
    done = convert(source, tmp_path / "b", "vllm")
    assert done.config.num_layers == 2 and any("tied" in note for note in done.notes)
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert all(
        torch.equal(again[f"blocks.{k}.layers.{n}.weight"], module[k][0].linear.weight)
        for k in (0, 1)
        for n in (0, 1)
    )
    blocks = {name: tensor for name, tensor in state.items() if ".linear" in name}
    source = medusa_1_0(tmp_path / "d", blocks, medusa_num_heads=2, medusa_num_layers=2)
    with pytest.raises(CheckpointError, match="tied layers"):
        convert(source, tmp_path / "c", "vllm")


def test_trap_layers_that_differ_would_be_lost_where_the_loader_repeats_one(
    tmp_path: Path, base: Path
) -> None:
    source = written(plain("own", layers=2), tmp_path, base)
    for name in ("fasterdecoding", "medusa-1.0"):
        with pytest.raises(ConfigError, match="repeats one layer"):
            convert(source, tmp_path / "b", name, str(base))
    assert not (tmp_path / "b").exists()


def test_trap_biases_are_dropped_by_vllm_unless_the_config_says_so(tmp_path: Path) -> None:
    source = fasterdecoding(tmp_path / "a", original_heads())
    convert(source, tmp_path / "b", "vllm")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["medusa_fc_bias"] is True
    assert (
        load_file(tmp_path / "b" / "model.safetensors")["blocks.0.layers.0.bias"].count_nonzero()
        > 0
    )
    with pytest.raises(ConfigError, match="have biases"):
        convert(source, tmp_path / "c", "native")
    config = json.loads((tmp_path / "b" / "config.json").read_text()) | {"medusa_fc_bias": False}
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    done = convert(tmp_path / "b", tmp_path / "d", "vllm")
    assert any("drops them silently" in note for note in done.notes)
    assert json.loads((tmp_path / "d" / "config.json").read_text())["medusa_fc_bias"] is True


def test_trap_zero_biases_are_no_biases(tmp_path: Path) -> None:
    module = original_heads()
    for head in module:
        torch.nn.init.zeros_(head[0].linear.bias)
    done = convert(fasterdecoding(tmp_path / "a", module), tmp_path / "b", "native")
    assert "All biases are zero, so they are left out." in done.notes
    assert torch.equal(load_heads(tmp_path / "b")[0].lm_heads[4], module[4][1].weight)


def vllm_source(folder: Path, base: Path, **config: Any) -> Path:
    native = written(plain(), folder, base)
    convert(native, folder / "vllm", "vllm", str(base))
    path = folder / "vllm" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder / "vllm"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = dict(load_file(folder / "model.safetensors"))
    change(tensors)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


def test_draft_temperatures_stay_where_they_can(tmp_path: Path, base: Path) -> None:
    heads = MedusaHeads(HeadsConfig(D, V, K))
    heads.temperatures_K.copy_(torch.tensor([0.75, 1.0, 1.25]))
    save_heads(tmp_path / "a", heads, lm_head_VD=base_lm_head())
    assert not convert(tmp_path / "a", tmp_path / "native", "native", "").notes
    assert load_heads(tmp_path / "native")[0].temperatures_K.tolist() == [0.75, 1.0, 1.25]
    done = convert(tmp_path / "a", tmp_path / "vllm", "vllm", str(base))
    assert any("draft temperatures are left out" in note for note in done.notes)
    assert "temperatures" not in load_file(tmp_path / "vllm" / "model.safetensors")


def test_trap_missing_and_unknown_tensors_are_named(tmp_path: Path, base: Path) -> None:
    source = vllm_source(tmp_path, base)
    edit(source, lambda t: t.update({"blocks.0.layers.0.scale": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match="scale"):
        convert(source, tmp_path / "x", "native")
    edit(source, lambda t: (t.pop("blocks.0.layers.0.scale"), t.pop("blocks.1.layers.0.weight")))
    with pytest.raises(CheckpointError, match=r"blocks\.1\.layers\.0\.weight is missing"):
        convert(source, tmp_path / "x", "native")


def test_trap_vllm_takes_any_key_with_num_and_heads_for_the_number_of_heads(
    tmp_path: Path, base: Path
) -> None:
    source = vllm_source(tmp_path, base, num_attention_heads=32)
    done = convert(source, tmp_path / "b", "vllm")
    assert done.config.num_heads == K and any("num_attention_heads" in note for note in done.notes)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert [key for key in config if "num" in key] == ["num_heads", "num_hidden_layers"]


def test_trap_fewer_drafts_than_heads_use_the_first_heads(tmp_path: Path, base: Path) -> None:
    """vLLM sets num_heads to num_speculative_tokens; what it then looks for must be in the file,
    under these names.
    """
    medusa = pytest.importorskip("vllm.transformers_utils.configs.medusa")
    config = medusa.MedusaConfig.from_pretrained(str(vllm_source(tmp_path, base)))
    assert config.num_lookahead_tokens == K
    config.num_lookahead_tokens = 2
    names = load_file(tmp_path / "vllm" / "model.safetensors")
    assert {f"blocks.{k}.layers.0.weight" for k in range(config.num_heads)} <= set(names)


def test_trap_the_vocabulary_must_be_the_models_own(tmp_path: Path, base: Path) -> None:
    """vLLM overwrites a vocab_size that differs; heads of another size are refused instead."""
    module = torch.nn.ModuleList(
        [torch.nn.Sequential(Residual(), torch.nn.Linear(D, V + 1, bias=False)) for _ in range(2)]
    )
    source = fasterdecoding(tmp_path / "a", module)
    with pytest.raises(CheckpointError, match="another model"):
        convert(source, tmp_path / "b", "vllm", str(base))
    convert(vllm_source(tmp_path, base, vocab_size=V + 24), tmp_path / "c", "vllm")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (V, V)


def test_trap_token_maps(tmp_path: Path, base: Path) -> None:
    source = vllm_source(tmp_path, base, truncated_vocab_size=8)
    edit(
        source,
        lambda t: t.update(
            {"token_map": torch.arange(8), "lm_head.weight": t["lm_head.weight"][:8]}
        ),
    )
    done = convert(source, tmp_path / "b", "native", str(base))
    assert any("draft_vocab" in note for note in done.notes) and done.config.vocab_size == V
    own = tmp_path / "own"
    convert(written(plain("own"), tmp_path / "o", base), own, "vllm")
    edit(own, lambda t: t.update({"token_map": torch.arange(8)}))
    with pytest.raises(CheckpointError, match="token_map"):
        convert(own, tmp_path / "c", "native")


def test_trap_a_shared_lm_head_must_be_in_vllms_folder(tmp_path: Path, base: Path) -> None:
    heads = plain()
    module = MedusaHeads(heads.config)
    module.load_trainable_state(heads.tensors)
    save_heads(tmp_path / "a", module)
    with pytest.raises(ConfigError, match="--model"):
        convert(tmp_path / "a", tmp_path / "b", "vllm")
    convert(tmp_path / "a", tmp_path / "b", "vllm", str(base))
    assert torch.equal(
        load_file(tmp_path / "b" / "model.safetensors")["lm_head.weight"], base_lm_head()
    )


def test_trap_the_other_place_of_a_shared_lm_head(tmp_path: Path, base: Path) -> None:
    """vLLM also takes lm_heads.0.weight for the shared one, and ignores the others."""
    source = vllm_source(tmp_path, base)
    edit(source, lambda t: t.update({"lm_heads.0.weight": t.pop("lm_head.weight")}))
    convert(source, tmp_path / "b", "native")
    stored = load_lm_head(tmp_path / "b")
    assert stored is not None and torch.equal(stored, base_lm_head())
    edit(source, lambda t: t.update({"lm_heads.1.weight": t["lm_heads.0.weight"]}))
    with pytest.raises(CheckpointError, match="drop all but the first"):
        convert(source, tmp_path / "c", "native")


def test_trap_vllm_reads_the_older_names_too(tmp_path: Path, base: Path) -> None:
    """{h}.{l}.linear.weight in a model_type medusa folder, and the prefix medusa_heads. that vLLM
    strips.
    """
    module = original_heads(2)
    for number, prefix in enumerate(("", "medusa_heads.")):
        folder = tmp_path / f"old{number}"
        folder.mkdir()
        save_file(
            {prefix + name: tensor.clone() for name, tensor in module.state_dict().items()},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(
            json.dumps({"model_type": "medusa", "num_heads": 2, "medusa_fc_bias": True})
        )
        assert convert(folder, tmp_path / f"new{number}", "vllm").source == "vllm"
        state = load_file(tmp_path / f"new{number}" / "model.safetensors")
        assert torch.equal(state["lm_heads.1.weight"], module[1][1].weight)


def test_trap_logit_scale_is_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(CheckpointError, match="logit_scale"):
        convert(vllm_source(tmp_path, base, logit_scale=0.5), tmp_path / "x", "native")


@pytest.mark.parametrize("to", ["tgi-v1", "tgi-v2"])
def test_writing_a_format_of_tgi_says_what_to_do(to: str, tmp_path: Path, base: Path) -> None:
    with pytest.raises(ConfigError, match="Set --to fasterdecoding"):
        convert(written(plain(), tmp_path, base), tmp_path / "x", to, str(base))
    assert not (tmp_path / "x").exists()


def test_reading_a_format_of_tgi_says_what_to_do(tmp_path: Path, base: Path) -> None:
    """Version 1 is FasterDecoding's names in a safetensors file, version 2 has no lm_heads."""
    v1 = tmp_path / "v1"
    v1.mkdir()
    state = {name: tensor.clone() for name, tensor in original_heads().state_dict().items()}
    save_file(state, v1 / "medusa_lm_head.safetensors")
    v2 = fasterdecoding(tmp_path / "v2", original_heads(own=False), version="2")
    for source in (v1, v1 / "medusa_lm_head.safetensors", v2):
        with pytest.raises(CheckpointError, match=r"Convert them once with medusa-ppo 0\.3\.0"):
            convert(source, tmp_path / "x", "vllm", str(base))


def test_trap_a_lone_model_file_hides_the_shard_with_the_heads(tmp_path: Path, base: Path) -> None:
    """transformers prefers model.safetensors to an index; in a full model both the base and the
    heads must be found.
    """
    from transformers import AutoModelForCausalLM

    source = written(plain("own"), tmp_path, base)
    for name, prefix in (("medusa-1.0", "medusa_head."), ("modelopt", "medusa_heads.")):
        convert(source, tmp_path / name, name, str(base))
        assert (
            not (tmp_path / name / "model.safetensors").exists()
            and (tmp_path / name / "tokenizer.json").exists()
        )
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())[
            "weight_map"
        ]
        assert index[f"{prefix}0.1.weight"] != index["lm_head.weight"]
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(model.lm_head.weight, base_lm_head())
    assert json.loads((tmp_path / "modelopt" / "config.json").read_text())["medusa"] == {
        "num_medusa_heads": K,
        "num_medusa_layers": 1,
    }
    assert (
        json.loads((tmp_path / "medusa-1.0" / "config.json").read_text())["medusa_num_heads"] == K
    )


def test_trap_copies_of_an_lm_head_are_shared_only_when_the_model_proves_it(
    tmp_path: Path, base: Path
) -> None:
    convert(written(plain(), tmp_path, base), tmp_path / "fd", "fasterdecoding", str(base))
    alone = convert(tmp_path / "fd", tmp_path / "x", "native")
    assert alone.config.lm_head == "own" and any("--model" in note for note in alone.notes)
    assert convert(tmp_path / "fd", tmp_path / "y", "native", str(base)).config.lm_head == "shared"


def test_trap_a_stale_lm_head_is_told(tmp_path: Path, base: Path) -> None:
    heads = MedusaHeads(plain().config)
    save_heads(tmp_path / "a", heads, lm_head_VD=base_lm_head() + 1)
    done = convert(tmp_path / "a", tmp_path / "b", "vllm", str(base))
    assert any("not the model's" in note for note in done.notes)
    assert torch.equal(
        load_file(tmp_path / "b" / "model.safetensors")["lm_head.weight"], base_lm_head()
    )


def test_the_kind_that_needs_our_plugin_is_refused(tmp_path: Path) -> None:
    save_heads(
        tmp_path / "a", MedusaHeads(HeadsConfig(D, V, K, "hydra")), lm_head_VD=base_lm_head()
    )
    for name in FORMATS:
        with pytest.raises(ConfigError, match="need our vLLM plugin"):
            convert(tmp_path / "a", tmp_path / "b", name)


# ---- the request


def test_a_single_file_is_a_source(tmp_path: Path) -> None:
    source = fasterdecoding(tmp_path / "a", original_heads())
    done = convert(source / "medusa_lm_head.pt", tmp_path / "b", "fasterdecoding")
    assert done.source == "fasterdecoding"
    again = convert(tmp_path / "b" / "medusa_lm_head.pt", tmp_path / "c", "vllm")
    assert again.source == "fasterdecoding"


def test_a_target_that_is_there_is_left_alone(tmp_path: Path, base: Path) -> None:
    source = written(plain(), tmp_path, base)
    with pytest.raises(ConfigError, match="already exists"):
        convert(source, source, "vllm", str(base))
    with pytest.raises(ConfigError, match="Unknown format"):
        convert(source, tmp_path / "x", "gguf")
    assert sorted(path.name for path in source.iterdir()) == ["config.json", "model.safetensors"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, base: Path) -> None:
    source = written(plain(), tmp_path, base)
    before = sorted(path.name for path in tmp_path.iterdir())
    for to, model in (("medusa-1.0", ""), ("modelopt", str(tmp_path / "no-model"))):
        with pytest.raises(MedusaError):
            convert(source, tmp_path / "x", to, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_tied_table_of_a_family_that_ties_by_default_is_found(tmp_path: Path) -> None:
    """Files of Gemma, as on the hub, hold no lm_head and don't say that it is the embedding."""
    save_file({"model.embed_tokens.weight": base_lm_head()}, tmp_path / "model.safetensors")
    config = {"model_type": "gemma3_text", "hidden_size": D, "vocab_size": V}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(open_base_model(str(tmp_path)).lm_head_VD, base_lm_head())


def test_a_model_that_can_not_be_used_is_named(tmp_path: Path, base: Path) -> None:
    source = written(plain(), tmp_path, base)
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        convert(source, tmp_path / "x", "vllm", str(tmp_path / "m"))
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"model.norm.weight": torch.zeros(D)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ModelError, match="lm_head was not found"):
        convert(source, tmp_path / "x", "vllm", str(tmp_path / "m"))
    save_file({"lm_head.weight": torch.zeros(V, 2 * D)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match="another actor"):
        convert(source, tmp_path / "x", "vllm", str(tmp_path / "m"))

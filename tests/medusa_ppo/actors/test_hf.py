"""Hidden states are tapped right for every family, and unusable model folders are refused with a
sentence.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from heads.errors import ConfigError, DataError, ModelError
from medusa_ppo.actors import hf

VOCAB = 48
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": lambda tied: LlamaConfig(**COMMON, tie_word_embeddings=tied),
    "qwen2": lambda tied: Qwen2Config(**COMMON, tie_word_embeddings=tied),
    "qwen3": lambda tied: Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=tied),
    "mistral": lambda tied: MistralConfig(**COMMON, sliding_window=4, tie_word_embeddings=tied),
    "gemma3": lambda tied: Gemma3TextConfig(
        **COMMON, head_dim=8, sliding_window=4, tie_word_embeddings=tied
    ),
    "gpt2": lambda tied: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=tied
    ),
}


def tiny(
    family: str,
    tied: bool,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](tied)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                "norm" in name or ".ln_" in name
            ):  # a norm of all ones would hide a tap before the last norm
                parameter.add_(torch.rand_like(parameter))
    return model.eval().to(device)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", CONFIGS)
def test_lm_head_of_tapped_hidden_is_the_models_own_logits(
    device: torch.device, family: str, tied: bool
) -> None:
    model = tiny(family, tied, device=device)
    ids_BT = torch.randint(0, VOCAB, (3, 9)).to(device)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, :4] = 0
    with torch.no_grad(), hf.HiddenTap(model) as tap:
        logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    weight_VD = hf.lm_head_weight(model)
    assert tap.hidden_BTD.shape == (3, 9, 32)
    assert torch.allclose(tap.hidden_BTD @ weight_VD.T, logits_BTV, atol=1e-5)
    assert (weight_VD is hf.embedding_weight(model)) == tied
    assert logits_BTV.std() > 1e-3


@pytest.mark.parametrize("family", CONFIGS)
def test_saved_and_loaded_actor_is_the_same_model(family: str, tmp_path: Path) -> None:
    model = tiny(family, tied=True)
    model.save_pretrained(tmp_path)
    loaded = hf.load_actor(tmp_path, "float32")
    ids_BT = torch.randint(0, VOCAB, (2, 5))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids_BT).logits, model(input_ids=ids_BT).logits)
    assert not loaded.training


def test_gradients_are_bit_identical_and_the_tap_holds_no_graph(device: torch.device) -> None:
    ids_BT = torch.randint(0, VOCAB, (2, 7)).to(device)

    def gradients(tapped: bool) -> list[torch.Tensor]:
        model = tiny("llama", tied=False, device=device)
        if tapped:
            with hf.HiddenTap(model) as tap:
                loss = model(input_ids=ids_BT, labels=ids_BT).loss
            assert not tap.hidden_BTD.requires_grad and tap.hidden_BTD.grad_fn is None
        else:
            loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        return [p.grad for p in model.parameters()]

    # A GPU adds the rows of the embedding's gradient up in any order.
    near = {"rtol": 0, "atol": 0} if device.type == "cpu" else {"rtol": 1e-4, "atol": 1e-6}
    for with_tap, without in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(with_tap, without, **near)


def test_hook_is_gone_after_the_context_even_when_the_forward_fails() -> None:
    model = tiny("llama", tied=True)
    with pytest.raises(IndexError), hf.HiddenTap(model):
        model(input_ids=torch.tensor([[VOCAB + 1]]))
    assert not model.base_model._forward_hooks


def test_exactly_one_forward_belongs_into_a_tap(device: torch.device) -> None:
    model = tiny("gpt2", tied=True, device=device)
    ids_BT = torch.randint(0, VOCAB, (1, 4)).to(device)
    with torch.no_grad(), hf.HiddenTap(model) as tap:
        with pytest.raises(DataError, match="0 forward passes"):
            _ = tap.hidden_BTD
        model(input_ids=ids_BT)
        model(input_ids=ids_BT)
    with pytest.raises(DataError, match="2 forward passes"):
        _ = tap.hidden_BTD


def test_wrapped_model_is_tapped_too(device: torch.device) -> None:
    class ModuleWrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **kwargs: torch.Tensor) -> torch.Tensor:
            return self.module(**kwargs).logits

    model = ModuleWrapper(tiny("qwen3", tied=False, device=device))
    ids_BT = torch.randint(0, VOCAB, (2, 4)).to(device)
    with torch.no_grad(), hf.HiddenTap(model) as tap:
        logits_BTV = model(input_ids=ids_BT)
    assert torch.allclose(tap.hidden_BTD @ hf.lm_head_weight(model).T, logits_BTV, atol=1e-5)


@pytest.mark.parametrize(
    ("setting", "value", "plain"),
    [
        ("final_logit_softcapping", 30.0, None),
        ("logit_scale", 0.0625, 1.0),
        ("logits_scaling", 8.0, 1.0),
    ],
)
def test_logits_that_are_more_than_a_product_are_refused_by_name(
    setting: str, value: float, plain: float | None
) -> None:
    """Gemma-2, Cohere, Granite: the engine's `compute_logits` has it, the companion's product had
    not, and nobody said so.
    """
    model = tiny("llama", tied=False)
    setattr(model.config, setting, plain)
    assert hf.as_view(model).lm_head_VD.shape[0]
    setattr(model.config, setting, value)
    with pytest.raises(ModelError, match=f"{setting}={value}"):
        _ = hf.as_view(model).lm_head_VD


def test_a_bias_of_lm_head_is_refused() -> None:
    model = tiny("llama", tied=False)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.weight.shape[0]))
    assert hf.as_view(model).lm_head_VD.shape[0]
    with torch.no_grad():
        model.lm_head.bias[3] = 0.5
    with pytest.raises(ModelError, match="bias of lm_head"):
        _ = hf.as_view(model).lm_head_VD


def test_the_plugin_sees_any_actor_through_a_view(device: torch.device) -> None:
    model = tiny("llama", tied=False, device=device)
    view = hf.as_view(model)
    assert (
        view.lm_head_VD is model.lm_head.weight
        and view.embedding_VD is model.model.embed_tokens.weight
    )
    assert hf.as_view(view) is view
    ids_BT = torch.randint(VOCAB, (2, 5)).to(device)
    with torch.no_grad(), view.tap() as tapped:
        logits_BTV = model(ids_BT).logits
    torch.testing.assert_close(tapped.hidden_BTD @ view.lm_head_VD.T, logits_BTV)


def test_real_actor_keeps_its_dtype(shared_dir: Path) -> None:
    model = hf.load_actor(shared_dir / "actors" / "gsm8k-4m", "bfloat16")
    tokenizer = hf.load_tokenizer(shared_dir / "actors" / "gsm8k-4m")
    ids_BT = tokenizer("Question: 1 + 1?\nAnswer:", return_tensors="pt").input_ids
    with torch.no_grad(), hf.HiddenTap(model) as tap:
        logits_BTV = model(input_ids=ids_BT).logits
    assert tap.hidden_BTD.dtype == torch.bfloat16
    assert torch.allclose(
        (tap.hidden_BTD @ hf.lm_head_weight(model).T).float(), logits_BTV.float(), atol=0.1
    )
    assert tokenizer.pad_token_id is not None


def test_missing_folder(tmp_path: Path) -> None:
    for call in (hf.load_actor, hf.load_tokenizer):
        with pytest.raises(ModelError, match="no such model folder") as caught:
            call(tmp_path / "nowhere")
        assert (
            caught.value.exit_code == 2 and caught.value.do and "nowhere" in str(caught.value.given)
        )


def test_folder_without_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not contain a transformers model"):
        hf.load_actor(tmp_path)


def test_hub_name_that_can_not_be_reached() -> None:
    with pytest.raises(ModelError, match="network"):
        hf.load_actor("nobody/no-such-model-here")


def test_folder_without_weights(tmp_path: Path) -> None:
    tiny("llama", tied=True).config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no weights"):
        hf.load_actor(tmp_path)


def test_damaged_weights(tmp_path: Path) -> None:
    tiny("llama", tied=True).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 64)
    with pytest.raises(ModelError, match="can't be loaded"):
        hf.load_actor(tmp_path)


def test_weights_that_would_be_random_are_refused(tmp_path: Path) -> None:
    model = tiny("llama", tied=False)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        hf.load_actor(tmp_path)


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_not_a_causal_lm(kind: str, tmp_path: Path) -> None:
    if kind == "encoder":
        model: PreTrainedModel = BertForMaskedLM(
            BertConfig(
                vocab_size=VOCAB,
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
            )
        )
    else:
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        )
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not a decoder-only causal LM"):
        hf.load_actor(tmp_path)


def test_pickled_weights_load_without_unpickling_objects(tmp_path: Path) -> None:
    model = tiny("llama", tied=True)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = hf.load_actor(tmp_path)
    assert torch.equal(hf.lm_head_weight(loaded), hf.lm_head_weight(model))


def test_pickled_code_is_never_run(tmp_path: Path) -> None:
    witness = tmp_path / "was-run"

    class Malice:
        def __reduce__(self):
            return Path.touch, (witness,)

    folder = tmp_path / "model"
    tiny("llama", tied=True).config.save_pretrained(folder)
    torch.save({"model.embed_tokens.weight": Malice()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        hf.load_actor(folder)
    assert not witness.exists()


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Unknown dtype"):
        hf.load_actor(tmp_path, "int3")


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    tiny("llama", tied=True).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="tokenizer can't be loaded"):
        hf.load_tokenizer(tmp_path)


def test_a_folder_with_mistrals_own_tokenizer_file_alone(tmp_path: Path) -> None:
    package = pytest.importorskip("mistral_common", reason="vLLM brings it")
    data = Path(package.__file__).parent / "data" / "tekken_240911.json"
    MistralConfig(**COMMON).save_pretrained(tmp_path)
    (tmp_path / "tekken.json").symlink_to(data)
    tokenizer = hf.load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer("hello", add_special_tokens=False).input_ids) == "hello"


def test_model_without_lm_head_can_not_be_an_actor() -> None:
    body = tiny("llama", tied=True).base_model
    with pytest.raises(ModelError, match="output embedding"):
        hf.lm_head_weight(body)
    with pytest.raises(ModelError, match="not a transformers model"):
        hf.HiddenTap(torch.nn.Linear(2, 2))

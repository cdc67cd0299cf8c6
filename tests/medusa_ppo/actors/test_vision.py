"""Images of a vision-language actor: features from the store are those of its own pass over pixels,
each image is computed once, and what can't be read is refused. As a script it is one of the ranks
that share the tower's work.
"""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from heads.checkpoint import load_state
from heads.errors import DataError, ModelError
from medusa_ppo.actors.hf import embedding_weight, lm_head_weight, load_actor, load_tokenizer
from medusa_ppo.actors.vision import (
    FeatureStore,
    ImageReader,
    copy_without_tower,
    features_of,
    forward,
    spread,
    tower_of,
)
from medusa_ppo.config.model_section import VISION_FAMILIES
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import ImagePrompt
from medusa_ppo.engines.actor_sync import actor_state
from medusa_ppo.runtime.data import image_files

Picture = Callable[..., bytes]


def loaded(folder: Path) -> tuple[Any, ImageReader]:
    return load_actor(folder), ImageReader.load(folder, load_tokenizer(folder))


def padded(rows: list[tuple[int, ...]]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def count_runs(actor: Any) -> list[int]:
    """Grows by one with each run of the tower."""
    runs: list[int] = []
    tower_of(actor).register_forward_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_features_give_what_pixels_give(vision_actor, picture: Picture, family: str):
    """Rows with an image, with two and without; logits and the gradient of an embedding, against
    the model's own way.
    """
    actor, reader = loaded(vision_actor(family))
    images = [(picture(0, 60, 90),), (picture(1), picture(2, 120, 60)), ()]
    prompts = reader.prompts(["what is it?", "compare them", "say a word"], images)
    ids_BT = padded([(*prompt, 65, 66, 67) for prompt in prompts])
    pixels, grids = zip(*(reader.pixels(image) for row in images for image in row), strict=True)
    kinds_BT = torch.zeros_like(ids_BT, dtype=torch.int32)
    kinds_BT[ids_BT == reader.image_id] = 1
    expected = actor(
        input_ids=ids_BT,
        pixel_values=torch.cat(pixels),
        image_grid_thw=torch.cat(grids),
        mm_token_type_ids=kinds_BT,
        use_cache=False,
    ).logits

    seen = FeatureStore(actor, reader).look(prompts, ids_BT)
    found = forward(copy_without_tower(actor, actor), ids_BT, seen).logits

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    others = [*reader.prompts(["what is it?"], [(picture(5, 60, 90),)]), *prompts[1:]]
    other = forward(actor, ids_BT, FeatureStore(actor, reader).look(others, ids_BT)).logits
    assert (other - expected)[0].abs().max() > 1e-3, "another image is another answer"


def test_an_image_token_that_the_actor_wrote_is_a_word(vision_actor, picture: Picture):
    """As if another word with the same embedding stood there; and the row's image is where it
    was.
    """
    actor, reader = loaded(vision_actor())
    (prompt,) = reader.prompts(["what?"], [(picture(),)])
    other = copy.deepcopy(actor)
    with torch.no_grad():
        table = other.get_input_embeddings().weight
        table[70] = table[reader.image_id]
    written = padded([(*prompt, reader.image_id, 66)])
    twin = padded([(*prompt, 70, 66)])
    store = FeatureStore(actor, reader)

    found = forward(actor, written, store.look([prompt], written)).logits

    torch.testing.assert_close(
        found, forward(other, twin, store.look([prompt], twin)).logits, rtol=0, atol=0
    )
    gradient = torch.autograd.grad(found[0, -1, 0], actor.get_input_embeddings().weight)[0]
    assert gradient[reader.image_id].any(), "its own embedding learns from it"


def test_each_image_is_computed_once_as_long_as_it_is_kept(vision_actor, picture: Picture):
    actor, reader = loaded(vision_actor())
    runs = count_runs(actor)
    images = [picture(seed) for seed in range(3)]
    prompts = reader.prompts(["a", "b", "c"], [(images[0],), (images[1], images[0]), (images[2],)])
    store = FeatureStore(actor, reader)
    ids_BT = padded(prompts)
    store.prefetch(prompts)
    for _ in range(3):
        assert store.look(prompts, ids_BT) is not None
    figures = store.figures()
    assert (
        len(runs) == 3
        and (figures[names.IMAGES], figures[names.TOWER_RUNS]) == (3, 3)
        and figures[names.TOWER_S] > 0
    )
    store.look(prompts[:1], ids_BT[:1])
    assert (store.figures()[names.IMAGES], len(runs)) == (1, 3)

    small = FeatureStore(actor, reader, most_bytes=1)
    for prompt in (prompts[0], prompts[2], prompts[0]):
        small.look([prompt], padded([prompt]))
    assert small.figures()[names.TOWER_RUNS] == 3, "forgotten, computed again, and counted"


def test_nothing_is_looked_at_where_no_prompt_has_an_image(vision_actor):
    actor, reader = loaded(vision_actor())
    prompts = reader.prompts(["a"], [()])
    assert (
        not isinstance(prompts[0], ImagePrompt)
        and FeatureStore(actor, reader).look(prompts, padded(prompts)) is None
    )


def test_a_prompt_holds_a_token_for_each_feature_and_travels(vision_actor, picture: Picture):
    actor, reader = loaded(vision_actor())
    image = picture(0, 60, 90)
    (prompt,) = reader.prompts(["x"], [(image,)])
    assert isinstance(prompt, ImagePrompt) and prompt.short_ids.count(reader.image_id) == 1
    assert (
        prompt.count(reader.image_id)
        == reader.count(image)
        == len(features_of(actor, reader, image).rows_NX)
        > 1
    )
    again = copy.deepcopy(prompt)  # As pickle takes it apart.
    assert again == prompt and (again.images, again.short_ids) == ((image,), prompt.short_ids)


def test_a_text_with_places_of_its_own_is_left_as_it_is(vision_actor, picture: Picture):
    _, reader = loaded(vision_actor())
    (prompt,) = reader.prompts([f"A{reader.image_token}B"], [(picture(),)])
    assert (prompt[0], prompt[-1]) == tuple(
        reader._tokenizer(["A", "B"])["input_ids"][i][0] for i in (0, 1)
    )


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_weights_are_named_as_in_the_actors_files(vision_actor, family: str):
    """By these names an engine compares and loads them."""
    actor = load_actor(vision_actor(family))
    state = actor_state(actor)
    file = load_state(vision_actor(family) / "model.safetensors")
    assert state.keys() == file.keys() and all(
        torch.equal(state[name], file[name]) for name in file
    )


def test_heads_read_its_tables(vision_actor):
    actor = load_actor(vision_actor())
    assert (
        lm_head_weight(actor) is actor.lm_head.weight
        and embedding_weight(actor) is actor.get_input_embeddings().weight
    )


@pytest.mark.parametrize(
    "damage", [lambda png: png[: len(png) // 2], lambda png: b"no image", lambda png: b""]
)
def test_an_image_that_cant_be_read_is_refused_by_its_row(
    vision_actor, picture: Picture, damage: Callable[[bytes], bytes]
):
    _, reader = loaded(vision_actor())
    with pytest.raises(DataError, match=r"(?s)An image can't be read.*row 1"):
        reader.prompts(["a", "b"], [(picture(),), (damage(picture()),)])


def test_places_and_images_must_be_as_many(vision_actor, picture: Picture):
    _, reader = loaded(vision_actor())
    with pytest.raises(DataError, match="1 places, 2 images"):
        reader.prompts([reader.image_token], [(picture(), picture(1))])


def test_what_lacks_a_tower_or_a_processor_is_refused(
    vision_actor, chain_actor: Path, tmp_path: Path
):
    with pytest.raises(ModelError, match=r"(?s)no known vision tower.*llama"):
        ImageReader.load(chain_actor, load_tokenizer(chain_actor))
    with pytest.raises(ModelError, match=r"(?s)can't be given features.*LlamaForCausalLM"):
        FeatureStore(load_actor(chain_actor), loaded(vision_actor())[1])
    bare = shutil.copytree(vision_actor(), tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="image processor can't be loaded"):
        ImageReader.load(bare, load_tokenizer(bare))
    (bare / "chat_template.jinja").unlink()
    reader = ImageReader.load(vision_actor(), load_tokenizer(bare))
    with pytest.raises(DataError, match="chat template can't be used"):
        reader.prompts(["a"], [()])


def test_the_column_may_hold_paths_bytes_or_what_datasets_has(picture: Picture, tmp_path: Path):
    (tmp_path / "one.png").write_bytes(picture())
    data = tmp_path / "rows.jsonl"
    data.touch()
    values: list[Any] = [
        "one.png",
        str(tmp_path / "one.png"),
        picture(),
        {"bytes": picture(), "path": None},
        {"path": "one.png"},
        None,
    ]
    found = image_files(
        [{"image": value} for value in [*values, ["one.png", picture(1)]]], "image", str(data)
    )
    assert found == [(picture(),)] * 5 + [(), (picture(), picture(1))]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"picture": "a"}, "Did you mean picture"),
        ({"pictures": "none.png"}, "row 0, column pictures"),
        ({"pictures": 3}, "This is not an image"),
    ],
)
def test_a_column_or_file_that_is_not_there_is_refused(
    row: dict[str, Any], words: str, tmp_path: Path
):
    with pytest.raises(DataError, match=words):
        image_files([row], "pictures", str(tmp_path))


@pytest.mark.parametrize("images", [5, 1])
def test_two_ranks_share_the_towers_work(
    vision_actor, picture: Picture, run_ranks, tmp_path: Path, images: int
):
    """Each computes its share, both have all, and what they have is what one process computes."""
    actor, reader = loaded(vision_actor("qwen3_vl"))
    pictures = [picture(seed, 60, 60 + 40 * (seed % 3)) for seed in range(images)]
    for number, content in enumerate(pictures):
        (tmp_path / f"{number}.png").write_bytes(content)
    run_ranks(Path(__file__), 2, str(vision_actor("qwen3_vl")), str(tmp_path))
    expected = [features_of(actor, reader, image) for image in pictures]
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert (
        sum(part["runs"] for part in found) == images
        and max(part["runs"] for part in found) <= (images + 1) // 2
    )
    for part in found:
        for ours, theirs in zip(part["features"], expected, strict=True):
            assert torch.equal(ours[0], theirs.rows_NX) and torch.equal(ours[1], theirs.grid_3)
        assert part["error"] == ("OSError" if part["rank"] == 0 else "RunError"), (
            "a failure on one rank is an error on all"
        )


def _rank(rank: int, ranks: int, folder: str, place: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=ranks)
    actor, reader = loaded(Path(folder))
    runs = count_runs(actor)
    pictures = [path.read_bytes() for path in sorted(Path(place).glob("*.png"))]
    store = FeatureStore(actor, reader, group=dist.group.WORLD)
    prompts = reader.prompts(["x"] * len(pictures), [(image,) for image in pictures])
    seen = store.look(prompts, padded(prompts))
    assert seen is not None
    found = {
        "rank": rank,
        "runs": len(runs),
        "features": [tuple(part) for part in seen.features],
        "error": "",
    }

    def fail(image: bytes) -> Any:
        if rank == 0:
            raise OSError("the first rank's")
        return features_of(actor, reader, image)

    try:
        spread(pictures, [1] * len(pictures), fail, dist.group.WORLD)
    except Exception as error:
        found["error"] = type(error).__name__
    torch.save(found, f"{place}/rank{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    _rank(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

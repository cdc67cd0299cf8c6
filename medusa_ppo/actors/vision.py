"""Images for a vision-language actor: prompts with their image tokens, and the frozen tower's
features, computed once per image.

The tower is the actor's own, and PPO keeps it frozen. So its features of an image never change:
actor, critic and reference all read features that are computed once (`FeatureStore`), and only the
actor has a tower. The engine is a separate program and computes its own. Each rank of a Megatron
actor has the tower without the rest of the actor (`load_tower`), and computes its share of the
images.

Shape letters: B rows, T tokens, I images, N features of an image (as many as it has tokens), D
hidden, L further levels of features that some families add to their first layers, X = D times (1 +
L).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import importlib.util
import inspect
import io
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import transformers
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.processing_utils import ProcessorMixin

from heads.errors import DataError, ModelError, RunError
from medusa_ppo.actors.hf import actor_config
from medusa_ppo.config.model_section import VISION_FAMILIES
from medusa_ppo.contract import metrics as names
from medusa_ppo.contract.rollouts import ImagePrompt

TORCHVISION_MODULE = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
PILLOW_MODULE = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
FEATURES_KEY = "mm_encoder_outputs"
"""transformers' argument for features that a forward pass takes instead of pixels."""
TOWER = "visual."
"""Prefix of the tower's names in a checkpoint."""
FEATURE_BYTES = 2 * 1024**3
"""Bytes of features kept on the host; beyond that the least recently used image is dropped.
"""


class Features(NamedTuple):
    """Features of one image, on the host. `rows_NX` float; `grid_3` int64: patches in time, height
    and width.
    """

    rows_NX: Tensor
    grid_3: Tensor


def tower_of(model: Any) -> Any:
    """The vision tower of a transformers model from a known family; None if there is none."""
    known = isinstance(model, PreTrainedModel) and model.config.model_type in VISION_FAMILIES
    return getattr(model.base_model, "visual", None) if known else None


def copy_without_tower(model: PreTrainedModel, part: nn.Module) -> Any:
    """A deep copy of the model, or of a part of it. It takes features, so it needs no tower."""
    tower = tower_of(model)
    # deepcopy treats entries in its memo as already copied.
    return copy.deepcopy(part, {} if tower is None else {id(tower): nn.Identity()})


def load_tower(path: str | os.PathLike[str], device: torch.device) -> PreTrainedModel:
    """The actor of a folder with its frozen vision tower alone, in float32: the language model has
    names and shapes, but no memory.

    Raises:
        ModelError: the folder has no such tower.
    """
    with torch.device("meta"):
        actor = AutoModelForImageTextToText.from_config(actor_config(path), dtype=torch.float32)
    # Made anew, because some of its buffers are computed and in no file.
    tower = type(tower_of(actor))._from_config(tower_of(actor).config, dtype=torch.float32)
    found = {name.removeprefix(TOWER): tensor for name, tensor in tower_tensors(path)}
    shapes = {name: tensor.shape for name, tensor in tower.state_dict().items()}
    unlike = {
        name for name, shape in shapes.items() if getattr(found.get(name), "shape", 0) != shape
    }
    unlike |= found.keys() - shapes.keys()
    if unlike:
        raise ModelError(
            "The vision tower in the checkpoint does not fit its configuration.",
            given=f"{os.fspath(path)}: {', '.join(sorted(unlike)[:3])}",
            expected=f"{len(shapes)} tensors whose names begin with {TOWER}",
            do="Save the whole actor with save_pretrained.",
        )
    tower.load_state_dict(found)
    cast(Any, actor.base_model).visual = tower.to(device).eval().requires_grad_(False)
    return actor


def tower_shapes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """The tower's tensors in a folder, by their names in the checkpoint."""
    return {name: tuple(part.get_shape()) for name, part in _tower_slices(path)}


def tower_tensors(path: str | os.PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """The same, one after the other, in the checkpoint's own kind of numbers."""
    return ((name, part[:]) for name, part in _tower_slices(path))


def _tower_slices(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                if name.startswith(TOWER):
                    yield name, handle.get_slice(name)


class _ImageProcessor:
    """Replaces a processor's video part, for callers that request sizes from it (vLLM with
    Qwen3-VL).
    """

    def __get__(self, processor: Any, kind: type) -> Any:
        return self if processor is None else processor.image_processor


@functools.cache
def spare_torchvision() -> None:
    """Let a transformers processor that also reads videos be loaded for images alone, without
    torchvision.

    transformers 5.19 also has image processors based on Pillow, but loads a processor as a whole,
    and its video part needs torchvision. vLLM 0.32 imports a function from the torchvision-based
    module; the Pillow-based one has it too.
    """
    if importlib.util.find_spec("torchvision") is None and hasattr(
        ProcessorMixin, "get_attributes"
    ):
        mixin = cast(Any, ProcessorMixin)
        attributes = mixin.get_attributes.__func__
        mixin.get_attributes = classmethod(
            lambda cls: [name for name in attributes(cls) if name != "video_processor"]
        )
        mixin.video_processor = _ImageProcessor()
        stand_in: Any = ModuleType(TORCHVISION_MODULE)
        stand_in.__getattr__ = lambda name: getattr(importlib.import_module(PILLOW_MODULE), name)
        sys.modules.setdefault(TORCHVISION_MODULE, stand_in)


def open_image(content: bytes) -> Image.Image:
    """A whole image in RGB, as Pillow reads it. Raises whatever Pillow does."""
    return Image.open(io.BytesIO(content)).convert("RGB")


class ImageReader:
    """How an actor reads images: its chat template places them in a prompt, and its image processor
    prepares them for the tower.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, processor: Any, image_id: int) -> None:
        """
        Args:
            processor: an image processor of the Qwen-VL kind.
            image_id: the token that stands for a feature.
        """
        self._tokenizer = tokenizer
        self._processor = processor
        self.image_id = image_id

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase) -> ImageReader:
        """The reader of the model at this path; ModelError if the model has no known vision tower
        or no image processor.
        """
        name = os.fspath(path)
        config = actor_config(path)
        if config.model_type not in VISION_FAMILIES:
            raise ModelError(
                "The actor has no known vision tower.",
                given=f"{name} (model_type {config.model_type})",
                expected=", ".join(VISION_FAMILIES),
                do="Set data.images=null, or choose such an actor.",
            )
        try:
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        except ImportError as error:
            # Older ones read images with torchvision alone, with which vLLM's CPU build breaks.
            raise ModelError(
                "This release of transformers can't read the actor's images here.",
                given=f"{name}, transformers {transformers.__version__}, without torchvision",
                expected="transformers 5.19, where images were tested",
                do="Install transformers 5.19, or set data.images=null.",
            ) from error
        # OSError, ValueError, KeyError, ...: one sentence for all.
        except Exception as error:
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            raise ModelError(
                "The actor's image processor can't be loaded.",
                given=f"{name} ({type(error).__name__}: {reason:.200})",
                expected="preprocessor_config.json beside the model",
                do="Copy it from the model that the actor was made from.",
            ) from error
        return cls(tokenizer, processor, int(config.image_token_id))

    def prompts(
        self, texts: Sequence[str], images: Sequence[tuple[bytes, ...]]
    ) -> list[tuple[int, ...]]:
        """One prompt for each row. Raises DataError if an image can't be read, or the template does
        not place the row's images.
        """
        return [
            self._prompt(row, text, files)
            for row, (text, files) in enumerate(zip(texts, images, strict=True))
        ]

    def _prompt(self, row: int, text: str, images: tuple[bytes, ...]) -> tuple[int, ...]:
        short = tuple(
            self._tokenizer(self._rendered(text, len(images)), add_special_tokens=False)[
                "input_ids"
            ]
        )
        if short.count(self.image_id) != len(images):
            raise DataError(
                "The prompt does not hold the row's images.",
                given=f"row {row}: {short.count(self.image_id)} places, {len(images)} images",
                expected="as many places as images",
                do=(
                    f"Correct the row, the model's chat template, or {self.image_token} in"
                    " data.template."
                ),
            )
        if not images:
            return short
        counts = iter([self.count(image, row) for image in images])
        ids = [
            i for token in short for i in [token] * (next(counts) if token == self.image_id else 1)
        ]
        return ImagePrompt(ids, images, short)

    def _rendered(self, text: str, images: int) -> str:
        """Format as a user message after its images; a text that already places images is not
        changed.
        """
        # The template of the data may place them itself.
        if self.image_token in text:
            return text
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
        messages: Any = [{"role": "user", "content": content}]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # No template, or whatever jinja raises.
            raise DataError(
                "The actor's chat template can't be used.",
                given=f"{type(error).__name__}: {str(error)[:200]}",
                expected="a template that takes a list of images and texts",
                do=(
                    f"Add the model's chat_template.jinja, or write {self.image_token} into"
                    " data.template."
                ),
            ) from error

    @property
    def image_token(self) -> str:
        """The text of the image token."""
        return str(self._tokenizer.convert_ids_to_tokens(self.image_id))

    def count(self, image: bytes, row: int | None = None) -> int:
        """Number of features of the image. Raises DataError if it can't be read."""
        try:
            width, height = open_image(image).size
            patches = self._processor.get_number_of_image_patches(height, width, {})
        except Exception as error:
            # Pillow raises OSError, SyntaxError, ValueError and its own errors; the processor
            # ValueError for a very long image.
            raise DataError(
                "An image can't be read.",
                given=f"row {row}: {len(image)} bytes ({type(error).__name__}: {str(error)[:200]})",
                expected="a whole image that Pillow reads, not more than 200 times as long as wide",
                do="Replace it, or remove the row.",
            ) from error
        return int(patches) // self._processor.merge_size**2

    def pixels(self, image: bytes) -> tuple[Tensor, Tensor]:
        """The tower's input for an image: its patches, and its grid_I3."""
        found = self._processor(images=[open_image(image)], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]

    def save(self, folder: Path) -> None:
        """Write the image processor beside a model."""
        self._processor.save_pretrained(folder)


def features_of(actor: PreTrainedModel, reader: ImageReader, image: bytes) -> Features:
    """One run of the tower on a single image, so that the result does not depend on which images
    are computed together.
    """
    pixels, grid_I3 = reader.pixels(image)
    device = next(tower_of(actor).parameters()).device
    model: Any = actor
    with torch.no_grad():
        found = model.get_image_features(pixels.to(device), grid_I3.to(device), return_dict=True)
    levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    return Features(torch.cat([level[0] for level in levels], dim=1).cpu(), grid_I3[0])


def spread(
    images: Sequence[bytes],
    sizes: Sequence[int],
    compute: Callable[[bytes], Features],
    group: dist.ProcessGroup,
) -> list[Features]:
    """The features of all images on every rank of a group, each image computed by one of them: data
    parallelism, whatever else the ranks share. All ranks must call it with the same images; the
    next largest image always goes to the rank with the least work.

    Args:
        sizes: number of features of each image.

    Raises:
        RunError: another rank failed; the failed rank raises its own error.
    """
    rank = dist.get_rank(group)
    load = [0] * dist.get_world_size(group)
    mine = list[int]()
    for place in sorted(range(len(images)), key=lambda i: -sizes[i]):
        owner = load.index(min(load))
        load[owner] += sizes[place]
        if owner == rank:
            mine.append(place)
    own = dict[int, Features]()
    failure = None
    try:
        own = {place: compute(images[place]) for place in mine}
    except Exception as error:  # Raised below, once the others know of it.
        failure = error
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    width_failed = torch.tensor(
        [
            max((part.rows_NX.shape[1] for part in own.values()), default=0),
            int(failure is not None),
        ],
        device=device,
    )
    dist.all_reduce(width_failed, dist.ReduceOp.MAX, group=group)
    width, failed = width_failed.tolist()
    # After the reduction, in which the other ranks take part.
    if failure is not None:
        raise failure
    if failed:
        raise RunError(
            "The vision tower failed on another rank.",
            given=f"rank {rank} waits",
            expected="features",
            do="Read its message.",
        )
    rows_NX = torch.zeros((sum(sizes), width), device=device)
    grids_I3 = torch.zeros((len(images), 3), dtype=torch.int64, device=device)
    parts_NX = rows_NX.split(list(sizes))
    for place, part in own.items():
        parts_NX[place].copy_(part.rows_NX)
        grids_I3[place] = part.grid_3.to(device)
    # Only one rank has values other than zero for an image, so the sum is exact.
    for shared in (rows_NX, grids_I3):
        dist.all_reduce(shared, group=group)
    return [
        # A view would keep the features of all images alive.
        Features(part_NX.cpu().clone(), grid_3.cpu())
        for part_NX, grid_3 in zip(parts_NX, grids_I3, strict=True)
    ]


class FeatureStore:
    """Features of the last images; each is computed once, in a separate thread, when it is first
    needed or earlier.

    Attributes:
        reader: what reads the images.
    """

    def __init__(
        self,
        actor: PreTrainedModel,
        reader: ImageReader,
        *,
        most_bytes: int = FEATURE_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            actor: the model with the tower.
            most_bytes: budget for stored features. If it is smaller than a step's images, they are
                computed more than once, and counted.
            group: ranks that share the tower's work, each with a store that gets the same images in
                the same order; None: none.

        Raises:
            ModelError: the model does not accept features instead of pixels.
        """
        if FEATURES_KEY not in inspect.signature(actor.forward).parameters:
            raise ModelError(
                "The actor can't be given features of images.",
                given=f"{type(actor).__name__}, transformers {transformers.__version__}",
                expected=f"a vision-language model whose forward pass takes {FEATURES_KEY}",
                do="Set data.images=null, choose such an actor, or install transformers 5.19.",
            )
        self.reader = reader
        self._actor = actor
        self._most_bytes = most_bytes
        self._group = group
        # torch's number of threads is set per thread. A single thread, so that images are computed
        # in the order of the requests, on all ranks.
        self._thread = ThreadPoolExecutor(
            1, "medusa-ppo-vision", torch.set_num_threads, (torch.get_num_threads(),)
        )
        self._kept: OrderedDict[bytes, Features] = OrderedDict()
        self._asked: set[bytes] = set()
        self._runs = 0
        self._seconds = 0.0
        self._told = (0, 0.0)

    def prefetch(self, prompts: Iterable[Sequence[int]]) -> None:
        """Start computing the images of these prompts. Failures occur again, and are raised, when
        the features are requested.
        """
        self._thread.submit(self._fill, by_content(images_of(prompts)))

    def look(self, prompts: Sequence[Sequence[int]], input_ids_BT: Tensor) -> ImageFeatures | None:
        """A model's input besides the token ids of these rows, each of which begins with its
        prompt; None without images.
        """
        images = images_of(prompts)
        if not images:
            return None
        different = by_content(images)
        found = self._thread.submit(self._fill, different).result()
        self._asked.update(found)
        keys = {image: key for key, image in different.items()}
        # One image may be in many rows.
        features = [found[keys[image]] for image in images]
        prompt_B1 = torch.tensor([[len(prompt)] for prompt in prompts], device=input_ids_BT.device)
        token_BT = input_ids_BT == self.reader.image_id
        columns_T = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)
        # Its embedding is never read: `forward` looks up the original id.
        other_id = 0 if self.reader.image_id else 1
        return ImageFeatures(
            features,
            token_BT & (columns_T < prompt_B1),
            token_BT & (columns_T >= prompt_B1),
            other_id,
            cast(Any, self._actor.base_model).get_rope_index,
        )

    def figures(self) -> dict[str, float]:
        """Different images used since the last call, and runs and seconds of the tower, which may
        be ahead of them.
        """
        (runs, seconds), now = self._told, (self._runs, self._seconds)
        found = {
            names.IMAGES: len(self._asked),
            names.TOWER_RUNS: now[0] - runs,
            names.TOWER_S: now[1] - seconds,
        }
        self._asked = set()
        self._told = now
        return found

    def _fill(self, images: dict[bytes, bytes]) -> dict[bytes, Features]:
        """Runs in the store's thread: the features of these images, by content; missing ones are
        computed and stored.
        """
        found = {key: self._kept.pop(key) for key in images if key in self._kept}
        missing = {key: image for key, image in images.items() if key not in found}
        began = time.perf_counter()
        try:
            found |= zip(missing, self._compute(list(missing.values())), strict=True)
        finally:
            self._kept |= found  # Most recently used, so dropped last.
        self._seconds += time.perf_counter() - began
        self._runs += len(missing)
        while (
            # An image larger than the budget is kept until the next one.
            len(self._kept) > 1
            and sum(part.rows_NX.nbytes for part in self._kept.values()) > self._most_bytes
        ):
            self._kept.popitem(last=False)
        return found

    def _compute(self, images: Sequence[bytes]) -> Iterable[Features]:
        compute = functools.partial(features_of, self._actor, self.reader)
        # All ranks keep the same images, so none of them has anything to compute.
        if self._group is None or not images:
            return map(compute, images)
        return spread(images, [self.reader.count(image) for image in images], compute, self._group)


def images_of(prompts: Iterable[Sequence[int]]) -> list[bytes]:
    """The images of prompts, one after the other."""
    return [
        image for prompt in prompts if isinstance(prompt, ImagePrompt) for image in prompt.images
    ]


def by_content(images: Iterable[bytes]) -> dict[bytes, bytes]:
    """Different images under a hash of each."""
    return {hashlib.sha256(image).digest(): image for image in images}


@dataclass(frozen=True)
class ImageFeatures:
    """Features of the images of a micro batch, and where they belong.

    Attributes:
        features: features of each image, row after row.
        placed_BT: bool, places of features.
        written_BT: bool, places where the actor has written the image token itself, like any other
            token: no feature belongs there.
        other_id: any other token.
        rope_index: the family's own way from token ids and the grids of images to positions.
    """

    features: list[Features]
    placed_BT: Tensor
    written_BT: Tensor
    other_id: int
    rope_index: Callable[..., tuple[Tensor, Tensor]]

    def positions(self, input_ids_BT: Tensor) -> Tensor:
        """Each token's positions in time, height and width (3, B, T), on the host. The rows may
        have more padding on the right than the micro batch.
        """
        more = input_ids_BT.shape[1] - self.placed_BT.shape[1]
        placed_BT = nn.functional.pad(self.placed_BT.cpu(), (0, more), value=False)
        grids_I3 = torch.stack([part.grid_3 for part in self.features])
        return self.rope_index(
            input_ids_BT.cpu(), mm_token_type_ids=placed_BT.int(), image_grid_thw=grids_I3
        )[0]

    def arguments(self, embedding_VD: Tensor) -> dict[str, Any]:
        """Arguments of the pass of a model with these token embeddings, instead of pixels."""
        rows = [part.rows_NX.to(embedding_VD.device, embedding_VD.dtype) for part in self.features]
        levels = list(
            zip(*(part_NX.split(embedding_VD.shape[1], dim=1) for part_NX in rows), strict=True)
        )
        found = SimpleNamespace(pooler_output=levels[0], deepstack_features=levels[1:])
        grids_I3 = torch.stack([part.grid_3 for part in self.features]).to(embedding_VD.device)
        return {
            FEATURES_KEY: {"image": found},
            "image_grid_thw": grids_I3,
            "mm_token_type_ids": self.placed_BT.int(),
        }


def forward(model: Any, input_ids_BT: Tensor, seen: ImageFeatures | None, **more: Any) -> Any:
    """A model's pass over token ids, and over the images that belong to them.

    transformers takes every image token for the place of a feature. An image token that the actor
    has written is hidden behind another id, but keeps its own embedding.
    """
    if seen is None:
        return model(input_ids=input_ids_BT, use_cache=False, **more)
    table = model.get_input_embeddings()
    hidden_BT = input_ids_BT.masked_fill(seen.written_BT, seen.other_id)
    handle = (
        # Only this lookup sees the original id.
        table.register_forward_pre_hook(lambda module, given: (input_ids_BT,))
        if bool(seen.written_BT.any())
        else None
    )
    try:
        return model(input_ids=hidden_BT, use_cache=False, **seen.arguments(table.weight), **more)
    finally:
        if handle is not None:
            handle.remove()

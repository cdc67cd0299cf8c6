"""The worker extension: methods inside vLLM's worker that engines call by name through
`collective_rpc`.

Arguments and results are JSON (paths, numbers, lists), so the same calls work in process, across
processes and over HTTP, and nothing is pickled. An error is returned as data (`{"error": ...}`),
because vLLM's transports keep only the text of an exception.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from heads.checkpoint import LM_HEAD_KEY
from heads.errors import ModelError, SwapError
from heads.tensorfile import CODES, Header, read_header
from medusa_ppo.actors.hf import table_files, table_names
from medusa_ppo.contract.status import Checked
from medusa_ppo.feeds.actor_sketch import actor_sketch, sketch_rows
from medusa_ppo.runtime.files import forget_registration
from medusa_ppo.runtime.rendezvous import device_id
from medusa_ppo.vllm_plugin.confirm import read_state
from medusa_ppo.vllm_plugin.cost_key import cost_key
from medusa_ppo.vllm_plugin.drafter import drafter_of
from medusa_ppo.vllm_plugin.patches import pack_tied_lm_head
from medusa_ppo.vllm_plugin.rank_agreement import agreed_by_all, together
from medusa_ppo.vllm_plugin.registration import activate, require_active
from medusa_ppo.vllm_plugin.second_set import begin_beside
from medusa_ppo.vllm_plugin.speculation import feeds_itself
from medusa_ppo.vllm_plugin.target_tables import lm_head_weight
from medusa_ppo.vllm_plugin.transfer import read_entries
from medusa_ppo.vllm_plugin.vllm_versions import vllm_version
from medusa_ppo.vllm_plugin.worker_calls import Drafting, always_answers, reports_errors

logger = logging.getLogger(__name__)

PROCESS = secrets.token_hex(8)
"""Identifies this process on any machine: process ids are reused."""


class MedusaWorker:
    """Methods that vLLM mixes into its worker class (`worker_extension_cls`)."""

    _medusa_ahead: tuple[str, Future[Any]] | None = None
    """File of a feed whose heads are being prepared, and what comes of it."""

    @reports_errors
    def medusa_plugin_report(self) -> dict[str, Any]:
        """Proof that our plugin is active in this very process."""
        patches = require_active()
        forget_registration()  # Every engine of ours asks for this report when it starts.
        drafter = self._medusa_drafter()
        return {
            "pid": os.getpid(),
            "vllm": vllm_version(),
            "torch": str(torch.__version__),
            "patches": patches,
            "drafter": type(drafter).__name__ if drafter else "",
            "kind": drafter.heads.config.kind if drafter else "",
            "max_drafts": drafter.num_speculative_tokens if drafter else 0,
            "num_drafts": drafter.num_drafts if drafter else 0,
            "threads": torch.get_num_threads(),
            "feeds_itself": feeds_itself(),
        }

    @reports_errors
    def medusa_swap_heads(
        self, path: str, version: int, checked: list[Any] | None = None
    ) -> dict[str, Any]:
        """Swap the serving heads in place; see `MedusaProposer.swap`. vLLM runs it between two
        steps.
        """
        started = time.perf_counter()
        digest = self._medusa_require_drafter().swap(
            path, int(version), Checked(*checked) if checked else None
        )
        return {
            "version": int(version),
            "checksum": digest,
            "seconds": time.perf_counter() - started,
        }

    @always_answers
    def medusa_feed_state(self) -> dict[str, Any]:
        """What an engine needs to know once to feed itself: sizes of the heads, and a sketch of the
        actor (empty if its folder has no safetensors), which takes a part of a second.
        """
        drafter = self._medusa_require_drafter()
        return {"heads": drafter.heads.config.to_dict(), "sketch": self._medusa_sketch()}

    @always_answers
    def medusa_feed_version(self) -> dict[str, Any]:
        """Version of the heads that serve, as far as this rank knows; -1 if they are gone. It is
        asked between two steps, so nothing is read: whatever loses heads looks at them itself
        (`MedusaProposer.held_version`, called when the worker wakes up).
        """
        drafter = self._medusa_require_drafter()
        return {"version": drafter.version if drafter.fed else -1}

    @always_answers
    def medusa_feed_ahead(self, path: str, checked: list[Any]) -> dict[str, Any]:
        """Start preparing a feed's heads beside the engine's work; `medusa_feed_heads` loads
        them.
        """
        drafter = self._medusa_require_drafter()
        self._medusa_ahead = path, begin_beside(drafter.ahead(path, Checked(*checked)))
        return {}

    @always_answers
    def medusa_feed_ready(self) -> dict[str, Any]:
        """Whether that has finished, with or without success."""
        ahead = self._medusa_ahead
        return {"ready": ahead is None or ahead[1].done()}

    @always_answers
    def medusa_feed_heads(self, path: str, version: int, checked: list[Any]) -> dict[str, Any]:
        """`medusa_swap_heads` from a feed. If these heads serve already, nothing is loaded and
        they keep their version: a loop that swapped them in knows them by its own number.
        """
        started = time.perf_counter()
        drafter = self._medusa_require_drafter()
        ahead = None
        # Lost heads may be loaded again while newer ones are being prepared.
        if self._medusa_ahead is not None and self._medusa_ahead[0] == path:
            ahead, self._medusa_ahead = self._medusa_ahead, None
        # After an error on one rank they may differ; a swap is a meeting of all of them.
        if not agreed_by_all(drafter.fed and drafter.heads_checksum == checked[0]):
            ready = None
            if ahead is not None:
                ready = partial(drafter.made_beside, ahead[1], path, Checked(*checked))
            drafter.swap(path, int(version), Checked(*checked), ready)
        return {
            "version": int(version),
            "checksum": drafter.heads_checksum,
            "seconds": time.perf_counter() - started,
        }

    @reports_errors
    def medusa_sync_actor(
        self, path: str, version: int, checked: list[Any] | None = None
    ) -> dict[str, Any]:
        """Load the actor's weights (safetensors with HF names) into the running model, including
        prepacked copies.

        The caller must have no running requests and must reset the prefix cache afterwards.
        """
        started = time.perf_counter()
        state, digest, names = together(
            "reading the actor", lambda: self._medusa_read_actor(path, checked)
        )
        # The actor is incomplete until everything is loaded.
        self._medusa_actor = (-1, "")
        together("loading the actor", lambda: self._medusa_load(state, names))
        lm_head_VD = state.get(LM_HEAD_KEY)
        self._medusa_took_actor(
            version, digest, None if lm_head_VD is None else lm_head_VD[:, :2], path
        )
        return {
            "version": int(version),
            "checksum": digest,
            "seconds": time.perf_counter() - started,
        }

    @reports_errors
    def medusa_check_actor(self, entries: dict[str, list[Any]]) -> dict[str, Any]:
        """Check that an actor with these tensors (`ActorStream.header`) fits this model; changes
        nothing.
        """
        read_entries(entries)
        self._medusa_check_entries(
            {name: (code, tuple(shape)) for name, (code, shape) in entries.items()}, "the broadcast"
        )
        return {"device": device_id(self.device)}  # type: ignore[attr-defined]

    @reports_errors
    def medusa_join_transfer(self, place: dict[str, Any]) -> dict[str, Any]:
        """Join the group in which the trainer broadcasts; see `runtime.rendezvous.Place`."""
        self.init_weight_transfer_engine({"place": place})  # type: ignore[attr-defined]
        return {}

    @reports_errors
    def medusa_receive_actor(self, entries: dict[str, list[Any]], version: int) -> dict[str, Any]:
        """One session of vLLM's weight-transfer API, as a single call between two steps, while the
        trainer sends.

        The caller must have no running requests and must reset the prefix cache afterwards. Version
        -1: the transfer broke off half-way.
        """
        started = time.perf_counter()
        self._medusa_actor = (-1, "")
        together("receiving the actor", lambda: self._medusa_receive(entries))
        came = self.weight_transfer_engine  # type: ignore[attr-defined]
        self._medusa_took_actor(version, came.checksum, came.lm_head_V2, "the broadcast")
        return {
            "version": int(version),
            "checksum": came.checksum,
            "seconds": time.perf_counter() - started,
        }

    @reports_errors
    def medusa_target_changed(self, version: int) -> dict[str, Any]:
        """Another loop has loaded the actor's weights by its own means; their checksum is unknown
        here.
        """
        self._medusa_require_drafter()
        self._medusa_took_actor(version, "", None, "the loop")
        return {"version": int(version)}

    @reports_errors
    def medusa_checksums(self) -> dict[str, Any]:
        """Checksums of what was loaded last; empty for an actor that was never synced (its weights
        are the model folder's), and for heads that are gone (version -1).
        """
        drafter = self._medusa_drafter()
        version, actor = getattr(self, "_medusa_actor", (0, ""))
        held = drafter.held_version() if drafter is not None else 0
        return {
            "heads": drafter.heads_checksum if drafter is not None and held >= 0 else "",
            "heads_version": held,
            "actor": actor,
            "actor_version": version,
            "process": PROCESS,
        }

    @reports_errors
    def medusa_configure(self, settings: Drafting) -> dict[str, Any]:
        """Change how drafts are made from the next step on; see `MedusaProposer.configure`."""
        return self._medusa_require_drafter().configure(settings)

    @reports_errors
    def medusa_remember(self, rows: list[list[Any]]) -> dict[str, Any]:
        """Add responses of other engines to the memory; see `ResponseMemory.take`."""
        memory = self._medusa_require_drafter().memory
        if memory is not None:
            memory.store.take(rows)
        return {"bytes": 0 if memory is None else memory.store.nbytes}

    @reports_errors
    def medusa_choices(self) -> dict[str, Any]:
        """How many drafts the steps since the last call had; see `DraftChooser.take_report`."""
        return {"rows": self._medusa_require_drafter().chooser.take_report()}

    @reports_errors
    def medusa_calibrate(self, drafts: int | None) -> dict[str, Any]:
        """Time steps with this many drafts; see `MedusaProposer.calibrate`."""
        return {"steps": self._medusa_require_drafter().calibrate(drafts)}

    @reports_errors
    def medusa_step_times(self, rows: list[dict[str, float]] | None = None) -> dict[str, Any]:
        """The table of step times by which the number of drafts is chosen, after learning `rows`;
        also its key, and the numbers to choose from.
        """
        drafter = self._medusa_require_drafter()
        chooser = drafter.chooser
        chooser.table.learn(rows or ())
        return {
            "key": cost_key(drafter),
            "choices": chooser.allowed,
            "rows": chooser.table.rows(),
        }

    @reports_errors
    def medusa_probe(self, hidden: list[list[float]], last_ids: list[int]) -> dict[str, Any]:
        """What the serving heads draft for given hidden states (one-hot)."""
        return {"drafts": self._medusa_require_drafter().probe(hidden, last_ids)}

    # ---- parts

    def _medusa_read_actor(
        self, path: str, checked: list[Any] | None
    ) -> tuple[dict[str, torch.Tensor], str, list[str]]:
        """The file's tensors, their checksum, and the names to load."""
        found = Checked(*checked) if checked else None
        state, digest = read_state(path, "the actor's weights", found)
        entries = {
            name: (CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()
        }
        return state, digest, self._medusa_check_entries(entries, path)

    @torch.inference_mode()
    def _medusa_load(self, state: dict[str, torch.Tensor], names: list[str]) -> None:
        weights = ((name, state[name]) for name in names)
        self.reload_weights(weights_iterator=weights)  # type: ignore[attr-defined]

    @torch.inference_mode()
    def _medusa_receive(self, entries: dict[str, list[Any]]) -> None:
        self.start_weight_update()  # type: ignore[attr-defined]
        update = {"entries": entries, "tied": self._medusa_tied()}
        self.update_weights(update)  # type: ignore[attr-defined]
        self.finish_weight_update()  # type: ignore[attr-defined]

    def _medusa_drafter(self) -> Any:
        """Our proposer; None without heads of ours."""
        drafter = drafter_of(self.model_runner)  # type: ignore[attr-defined]
        return drafter if hasattr(drafter, "held_version") else None

    def _medusa_require_drafter(self) -> Any:
        require_active()
        drafter = self._medusa_drafter()
        if drafter is None:
            raise SwapError(
                "The engine runs without draft heads.",
                given="no Medusa drafter",
                expected="heads",
                do="Start the engine with a heads folder.",
            )
        return drafter

    def _medusa_took_actor(
        self, version: int, digest: str, lm_head_V2: torch.Tensor | None, source: str
    ) -> None:
        """What must follow new weights in the model, however they arrived.

        Args:
            lm_head_V2: the new lm_head's first two columns; None if it was not sent. For a tied
                actor they are taken from the model's own parameter.
            source: where the weights came from, for an error's text.
        """
        runner = self.model_runner  # type: ignore[attr-defined]
        if pack_tied_lm_head(runner.get_model()):
            weight_VD = lm_head_weight(runner.get_model(), runner.model_config.get_vocab_size())
            lm_head_V2 = None if weight_VD is None else weight_VD[:, :2]
        if lm_head_V2 is not None:
            self._medusa_check_lm_head(lm_head_V2, source)
        drafter = self._medusa_drafter()
        if drafter is not None:
            drafter.target_changed()
        self._medusa_actor = (int(version), digest)

    def _medusa_check_entries(self, given: Header, source: str) -> list[str]:
        """The names to load, after comparing names, shapes and kinds of numbers with the model
        folder's own files.
        """
        model = self._medusa_model_folder()
        expected: Header = {}
        for part in sorted(model.glob("*.safetensors")) if model else []:
            expected.update(read_header(part))
        if not expected:
            logger.warning(
                "The actor's names and shapes are not checked: no safetensors of %s here.",
                self.vllm_config.model_config.model,  # type: ignore[attr-defined]
            )
        tied = self._medusa_tied()
        missing = [
            name for name in expected if name not in given and not (tied and name == LM_HEAD_KEY)
        ]
        unknown = [
            name
            for name in given
            if expected and name not in expected and not (tied and name == LM_HEAD_KEY)
        ]
        wrong = [
            f"{name} {given[name]}"
            for name in given
            if name in expected and not _alike(given[name], expected[name])
        ]
        if (missing or unknown or wrong) and (method := self._medusa_quantised()):
            raise SwapError(
                "The engine serves a quantised checkpoint, which can't take an actor's weights.",
                given=f"{source}: weights that {method} has not quantised",
                expected="an engine of the unquantised checkpoint that the actor began with",
                do="Start the engine with that model folder.",
            )
        if missing or unknown or wrong:
            raise SwapError(
                "The actor's weights are not those of the serving model, which stays as it is.",
                given=(
                    f"{source}: missing {missing[:3]}, unknown {unknown[:3]}, other shape or kind"
                    f" {wrong[:3]}"
                ),
                expected=f"the {len(expected)} tensors of {model}",
                do="Sync the state_dict of the same architecture.",
            )
        # A tied lm_head is the embedding; loading it a second time would only hide a difference.
        return [name for name in given if not (tied and name == LM_HEAD_KEY)]

    def _medusa_sketch(self) -> str:
        """`actor_sketch` of the model folder's lm_head; empty if it can't be read."""
        folder = self._medusa_model_folder()
        if folder is None:
            return ""
        try:
            return _sketch_of(folder)
        except ModelError:  # Not a causal LM of transformers; vLLM serves other models too.
            return ""
        # Of what transformers and safetensors raise for a folder that vLLM could load, nothing may
        # end the engine: for example a file of git-lfs that was never fetched, beside the weights.
        except Exception as error:
            logger.warning(
                "The lm_head of %s can't be read, so heads of a feed are compared with this actor"
                " by their sizes alone. %s: %s",
                folder,
                type(error).__name__,
                error,
            )
            return ""

    def _medusa_model_folder(self) -> Path | None:
        """The folder that vLLM loaded; for a hub name, the one in the hub's cache."""
        vllm_config = self.vllm_config  # type: ignore[attr-defined]
        model = vllm_config.model_config
        load = vllm_config.load_config
        try:
            found = cached_file(
                model.model,
                "config.json",
                revision=model.revision,
                cache_dir=load.download_dir,
                local_files_only=True,
            )
        except OSError:
            return None
        return Path(found).parent if found else None

    def _medusa_tied(self) -> bool:
        config = self.vllm_config  # type: ignore[attr-defined]
        return bool(getattr(config.model_config.hf_config, "tie_word_embeddings", False))

    def _medusa_quantised(self) -> str:
        """The method by which the model folder's tensors are quantised; empty: they are not."""
        config = self.vllm_config  # type: ignore[attr-defined]
        found = getattr(config.model_config.hf_config, "quantization_config", None) or {}
        return str(found.get("quant_method", "")) if isinstance(found, dict) else ""

    def _medusa_check_lm_head(self, given_V2: torch.Tensor, source: str) -> None:
        """The serving product must be that of the new lm_head (its first two columns): on the CPU a
        parameter can change while its prepacked copy does not. Ones and zeros round nothing, so the
        product is the same to the bit, however little PPO has changed.
        """
        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        processor = getattr(model, "logits_processor", None)
        if processor is None or processor.scale != 1.0 or processor.soft_cap is not None:
            return
        with torch.inference_mode():
            width = runner.model_config.get_hidden_size()
            device = self.device  # type: ignore[attr-defined]
            ones_2D = torch.eye(2, width, dtype=runner.dtype, device=device)
            served_2V = model.compute_logits(ones_2D).float()

        @torch.inference_mode()
        def compare() -> None:
            expected_2V = given_V2.to(served_2V.device, runner.dtype).T.float()
            if not torch.equal(served_2V, expected_2V[:, : served_2V.shape[1]]):
                raise SwapError(
                    "The engine still serves the old lm_head after the sync.",
                    given=source,
                    expected="the new one",
                    do="Restart the engine.",
                )

        together("serving the new lm_head", compare)


def _sketch_of(folder: Path) -> str:
    """`actor_sketch` of the folder's lm_head; empty if its safetensors have none."""
    name, _ = table_names(folder)
    for path in table_files(str(folder), (name, name)):
        with safe_open(path, "pt") as file:
            if name in set(file.keys()):
                table = file.get_slice(name)
                rows = sketch_rows(table.get_shape()[0])
                return actor_sketch(torch.cat([table[row : row + 1] for row in rows]))
    return ""


def _alike(given: tuple[str, tuple[int, ...]], expected: tuple[str, tuple[int, ...]]) -> bool:
    """Whether the shapes agree, and both are floating point or neither; the engine decides the
    width of floats.
    """
    return given[1] == expected[1] and ("F" in given[0]) == ("F" in expected[0])


# vLLM imports this module in the worker, before the model runner is built, and does not hide errors
# raised here.
activate()

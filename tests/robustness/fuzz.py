"""Bad input against whatever reads it: nothing but our own errors may come out, soon, and in
bounded memory.

    python tests/robustness/fuzz.py --cases 2000     # of each target; a slow one has its share
    python tests/robustness/fuzz.py --cases 100000 --only pt http --seed 3 --json fuzz.json
    python tests/robustness/fuzz.py --corpus tests/robustness/fuzz_corpus.jsonl

hypothesis draws cases (part of the dev extra), and each is then changed at random MUTATIONS times
over, which costs less than drawing. With `--corpus` the lines that cases reach guide the search:
half of the cases are changed forms of those that reached a line of ours, or a step from one line to
another, that no case before them did, and what is new is added to the file. A case is plain JSON;
what breaks something is made small where hypothesis drew it, and printed as a line for
tests/robustness/fuzz_found.jsonl, which a test replays without hypothesis, as it does the corpus.
Exit code 1 when something was found.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import logging
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import datasets
import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.checkpoint import load_heads, load_lm_head, load_state, save_heads, save_state
from heads.errors import MedusaError
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.config.run_config import RunConfig, load_config
from medusa_ppo.contract.rollouts import Sampling
from medusa_ppo.engines.http_server import Client, ServerEngine
from medusa_ppo.loops.passes import Generated, PassTap, RowFinder, as_rollouts, spans
from medusa_ppo.offline.foreign import read_foreign
from medusa_ppo.offline.picklefile import read_pickle_header, read_pickle_tensors
from medusa_ppo.ppo.run_state import read_position
from medusa_ppo.reports.page import render_page
from medusa_ppo.reports.run_files import read_run
from medusa_ppo.reports.summary import build_summary
from medusa_ppo.reports.tables import render_markdown
from medusa_ppo.runtime.console import say
from medusa_ppo.runtime.data import load_rows, render_prompts
from medusa_ppo.runtime.hardware import Hardware, settled

Case = Any
LIMIT_S = 10.0
SPARE_BYTES = 1 << 30
LONGEST_MESSAGE = 30_000
SLOW = {"config": 0.2, "report": 0.03, "data_file": 0.01, "http": 0.2, "heads": 0.5, "foreign": 0.5}
"""Share of the cases that a target gets whose cases take milliseconds."""
MOST_FOUND = 8
MUTATIONS = 15
SEEDS = 300
LONGEST_KEPT = 600
MOST_KEPT = 60
"""With a corpus: the cases drawn to begin with, the most characters of a case that is kept, and the
most cases that are kept of a target.
"""
HARNESS = Path(__file__).name
ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("heads", "medusa_ppo"))
ODD = (
    None,
    True,
    -1,
    0,
    1,
    255,
    65_535,
    1 << 31,
    1 << 64,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "null",
    "<script>alert(1)</script>",
    [],
    {},
)
"""What a mutation puts in the place of something."""
NODE = Hardware(0, False, 2, "made up")


class Hang(BaseException):
    """A case took longer than LIMIT_S."""


class Bench:
    """What the targets work with: a folder, and sound files to begin with."""

    def __init__(self, home: Path) -> None:
        self.home = home
        torch.manual_seed(0)
        table_VD = torch.randn(16, 8)
        save_heads(home / "heads", MedusaHeads(HeadsConfig(8, 16, 2)), lm_head_VD=table_VD)
        self._heads = {path.name: path.read_bytes() for path in (home / "heads").iterdir()}
        state = {
            "0.0.linear.weight": torch.randn(8, 8),
            "0.0.linear.bias": torch.zeros(8),
            "0.1.weight": table_VD,
        }
        save_state(home / "whole.safetensors", state)
        self._state = (home / "whole.safetensors").read_bytes()
        torch.save(state, home / "whole.pt")
        with zipfile.ZipFile(home / "whole.pt") as archive:
            self._records = {name: archive.read(name) for name in archive.namelist()}
        self._pickle = (home / "whole.pt").read_bytes()
        sizes = {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
        }
        self._tap = PassTap(
            LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)), Sampling(), 1 << 20, 2
        )

    # ---- one method for each target; it takes a case and raises what the reader raises

    def config(self, case: Case) -> None:
        """`text` or `values` as YAML, and `overrides`."""
        possible(all(isinstance(word, str) for word in case["overrides"]))
        file = self._write(
            "run.yaml",
            case["text"] if case.get("text") is not None else json.dumps(whole(case["values"])),
        )
        settled(load_config(file, case["overrides"]), NODE)

    def heads(self, case: Case) -> None:
        """A folder of heads: `set` changes config.json by dotted keys, `damage` the bytes of a
        file.
        """
        folder = self.home / "damaged"
        folder.mkdir(exist_ok=True)
        files = dict(self._heads)
        values = changed(json.loads(files["config.json"]), case["set"])
        files["config.json"] = json.dumps(values).encode()
        for name, data in files.items():
            (folder / name).write_bytes(damaged(data, case["damage"].get(name, [])))
        load_heads(folder)
        load_lm_head(folder)

    def state(self, case: Case) -> None:
        """A safetensors file: its header by dotted keys, its bytes."""
        size = int.from_bytes(self._state[:8], "little")
        header = changed(json.loads(self._state[8 : 8 + size]), case["set"], "/")
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + self._state[8 + size :]
        load_state(self._write("state.safetensors", damaged(data, case["damage"])))

    def pt(self, case: Case) -> None:
        """A .pt file: bytes of its pickle, bytes of the zip around it."""
        file = self._write(
            "heads.pt", self._packed(case["pickle"]) if case["pickle"] else self._pickle
        )
        file.write_bytes(damaged(file.read_bytes(), case["damage"]))
        read_pickle_tensors(file, list(read_pickle_header(file)))

    def foreign(self, case: Case) -> None:
        """A folder of another format: names and shapes of tensors, and a configuration."""
        possible(all(isinstance(name, str) for name, _ in case["tensors"]))
        possible(
            all(
                isinstance(size, int) and 0 <= size < 1000
                for _, shape in case["tensors"]
                for size in shape
            )
        )
        possible(
            all(len(shape) < 4 for _, shape in case["tensors"])
        )  # What is written here shall fit into the memory.
        folder = self.home / "foreign"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_state(
            folder / case["file"], {name: torch.ones(shape) for name, shape in case["tensors"]}
        )
        (folder / "config.json").write_text(json.dumps(whole(case["config"])))
        read_foreign(folder)

    def metrics(self, case: Case) -> None:
        """metrics.jsonl and run.json, read."""
        self._run(case)

    def report(self, case: Case) -> None:
        """The same, with its summary and both reports."""
        run = self._run(case)
        summary = build_summary(run)
        json.dumps(summary, allow_nan=False)
        render_markdown(run, summary)
        page = render_page(run, summary, other=run)
        if "<script>alert" in page:
            raise AssertionError("a text of the run became a script of the page")

    def resume(self, case: Case) -> None:
        """checkpoint/state.json by dotted keys, or another text."""
        state = {
            "format_version": 1,
            "version": "0",
            "next_step": 1,
            "policy_version": 1,
            "wall_s": 1.0,
            "config": RunConfig().model_dump(mode="json"),
        }
        state = changed(state, case["set"])
        (self.home / "run" / "checkpoint").mkdir(parents=True, exist_ok=True)
        self._write(
            "run/checkpoint/state.json", json.dumps(state) if case["text"] is None else case["text"]
        )
        read_position(self.home / "run", RunConfig())

    def http(self, case: Case) -> None:
        """Answers of a server: status and body of each path."""
        answers = case["answers"].values()
        possible(all(isinstance(pair, list) and len(pair) == 2 for pair in answers))
        possible(all(isinstance(status, int) and 0 <= status < 1000 for status, _ in answers))
        engine = ServerEngine.__new__(ServerEngine)
        engine.plan = SimpleNamespace(max_model_len=64, vocab_size=16, stop_ids=(0,))
        engine.max_drafts = 2
        engine._workers = 1
        engine._process = None
        engine._log = Path("/dev/null")

        def answer(request: httpx.Request) -> httpx.Response:
            status, body = case["answers"].get(request.url.path, (200, {}))
            return httpx.Response(
                status,
                content=(
                    body.encode("utf-8", "surrogatepass")
                    if isinstance(body, str)
                    else json.dumps(body).encode()
                ),
            )

        with Client(
            base_url="http://server", transport=httpx.MockTransport(answer)
        ) as engine._client:
            sampling = Sampling(max_new_tokens=4)
            engine._model_name = "model"
            for call in (
                lambda: engine.generate([[1, 2]], sampling),
                engine.counters,
                engine.plugin_report,
                engine.checksums,
            ):
                try:
                    call()
                except MedusaError as error:
                    check_message(error)
            engine._take_stock({})
            engine.configure(num_drafts=1)
            engine.swap_heads(self.home / "whole.safetensors", 1)

    def rows(self, case: Case) -> None:
        """Rows, and the template or column that makes prompts of them."""
        rows = case["rows"]
        texts = (case["template"], case["column"])
        possible(
            isinstance(rows, list)
            and all(isinstance(row, dict) for row in rows)
            and all(isinstance(text, str) for text in texts)
        )
        render_prompts(case["rows"], template=case["template"], column=case["column"])

    def data_file(self, case: Case) -> None:
        """A file of rows, by its ending."""
        load_rows(self._write(f"rows{case['ending']}", case["text"]))

    def loop(self, case: Case) -> None:
        """What a foreign loop generated, and what then goes through its model."""
        for name, rows in case.items():
            possible(isinstance(rows, list) and all(isinstance(row, list) for row in rows))
            for value in (value for row in rows for value in row):
                whole_number = isinstance(value, int) and abs(value) < 1 << 63
                possible(
                    whole_number
                    or (name == "logprobs" and (value is None or isinstance(value, float)))
                )
        rollouts = as_rollouts(
            Generated(case["prompts"], case["completions"], case["logprobs"]), Sampling()
        )
        ids, mask, positions = (
            torch.tensor(case[name], dtype=torch.int64).reshape(
                len(case[name]), -1 if case[name] and case[name][0] else 0
            )
            for name in ("ids", "mask", "positions")
        )
        finder = RowFinder(rollouts)
        for row, first, last in spans(ids, mask, positions):
            finder.find(ids[row : row + 1, first:last], torch.ones(1, last - first))
        if mask.shape == ids.shape:
            finder.find(ids, mask)
        watched = [(rollouts.prompts[r.prompt_index], r.token_ids) for r in rollouts.responses]
        with self._tap.watch(watched):
            self._tap._hook(
                self._tap._base,
                (ids,),
                {"attention_mask": mask, "position_ids": positions},
                (torch.zeros(*ids.shape, 4),),
            )
        self._tap.add_logprobs([torch.tensor(r.logprobs) for r in rollouts.responses])
        self._tap.take(1)

    def _run(self, case: Case) -> Any:
        folder = self.home / "run"
        folder.mkdir(exist_ok=True)
        lines = [line if isinstance(line, str) else json.dumps(line) for line in case["lines"]]
        self._write("run/metrics.jsonl", "\n".join(lines))
        self._write(
            "run/run.json",
            case["meta"] if isinstance(case["meta"], str) else json.dumps(whole(case["meta"])),
        )
        return read_run(folder)

    def _packed(self, damage: list[list[int]]) -> bytes:
        buffer = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for name, data in self._records.items():
                archive.writestr(name, damaged(data, damage) if name.endswith("data.pkl") else data)
        return buffer.getvalue()

    def _write(self, name: str, content: str | bytes) -> Path:
        path = self.home / name
        path.write_bytes(
            content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        )
        return path


class NoCaseError(Exception):
    """What a change made of a case is nothing that its reader can be given."""


def possible(is_so: bool) -> None:
    if not is_so:
        raise NoCaseError


REMOVE = "REMOVE"
TARGETS = (
    "config",
    "heads",
    "state",
    "pt",
    "foreign",
    "metrics",
    "report",
    "resume",
    "http",
    "rows",
    "data_file",
    "loop",
)


def changed(values: dict[str, Any], pairs: list[list[Any]], sign: str = ".") -> dict[str, Any]:
    """With nested values set by their paths, or removed; new mappings on the way where there are
    none.
    """
    for path, value in pairs:
        *parents, leaf = path.split(sign)
        node = values
        for name in parents:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        if value == REMOVE:
            node.pop(leaf, None)
        else:
            node[leaf] = value
    return values


def whole(value: Any) -> Any:
    """A value as it is drawn: `{"set": pairs}` is the mapping that these make."""
    return (
        changed({}, value["set"]) if isinstance(value, dict) and value.keys() == {"set"} else value
    )


def damaged(data: bytes, changes: list[list[int]]) -> bytes:
    """Bytes set ([place, value]), cut off ([place]), or put in twice ([place, length, times])."""
    out = bytearray(data)
    for change in changes:
        at = change[0] % max(1, len(out))
        if len(change) == 1:
            del out[at:]
        elif len(change) == 2 and out:
            out[at] = change[1]
        elif len(change) == 3:
            out[at:at] = bytes(out[at : at + change[1]]) * change[2]
    return bytes(out)


def check_message(error: MedusaError) -> None:
    if len(str(error)) > LONGEST_MESSAGE:
        raise AssertionError(f"a message of {len(str(error))} characters")


def attempt(bench: Bench, target: str, case: Case) -> None:
    """Try one case; raises what must not be: any error but ours, Hang, MemoryError."""

    def ring(signum: int, frame: object) -> None:
        raise Hang(f"more than {LIMIT_S:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        getattr(bench, target)(case)
    except MedusaError as error:
        check_message(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def mutated(case: Case, generator: random.Random) -> Case:
    """The same case with one to three of its values replaced, removed, put in twice, or moved to
    another place.
    """
    case = copy.deepcopy(case)
    for _ in range(generator.randint(1, 3)):
        places = list(_places(case))
        if not places:
            return case
        node, key = generator.choice(places)
        value = node[key]
        how = generator.random()
        if isinstance(value, int) and not isinstance(value, bool) and how < 0.5:
            node[key] = value + generator.choice((-1, 1, 256, generator.randrange(1 << 16)))
        elif isinstance(value, str) and value and how < 0.5:
            at = generator.randrange(len(value))
            node[key] = (
                value[:at]
                + generator.choice(("", "\0", "9", "{", value))
                + value[at + generator.randrange(2) :]
            )
        elif isinstance(node, list) and how < 0.7:
            node.insert(generator.randrange(len(node) + 1), copy.deepcopy(value))
        elif isinstance(node, list) and how < 0.8:
            del node[key]
        else:
            other, place = generator.choice(places)
            node[key] = copy.deepcopy(
                generator.choice((*ODD, other[place] if _has(other, place) else None))
            )
    return case


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a tree with every key or index in it; names of files stay, they are no
    input.
    """
    for key in (
        list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    ):
        if key not in ("file", "ending"):
            yield node, key
        yield from _places(node[key])


def _has(node: Any, key: Any) -> bool:
    return key in node if isinstance(node, dict) else key < len(node)


def try_mutants(
    bench: Bench, target: str, case: Case, seed: int, found: list[dict[str, Any]]
) -> None:
    """MUTATIONS changed forms of a case; what they break is added to `found`, once for each
    place.
    """
    generator = random.Random(seed)
    for _ in range(MUTATIONS):
        try_one(bench, target, mutated(case, generator), found)


def try_one(bench: Bench, target: str, case: Case, found: list[dict[str, Any]]) -> bool:
    """Whether it is a case of the target at all."""
    try:
        attempt(bench, target, case)
    except (Exception, Hang) as error:
        what = place(error)
        if not what.endswith(HARNESS) and all(
            entry["what"] != what for entry in found
        ):  # Else the case is none for this target.
            found.append({"target": target, "what": what, "case": case})
            say(f"  {target}: {what}")
        return not what.endswith(HARNESS)
    return True


class Reached:
    """Steps from line to line of our own code (templates included) that cases took."""

    def __init__(self) -> None:
        self.steps: set[tuple[int, int, int]] = set()
        self._ours: dict[str, bool] = {}

    def more_by(self, call: Callable[[], object]) -> bool:
        """Whether a call takes a step that none took before."""
        now = set[tuple[int, int, int]]()
        before = 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "line":
                now.add((id(frame.f_code), before, frame.f_lineno))
                before = frame.f_lineno
            return line

        def enter(frame: FrameType, event: str, argument: Any) -> Any:
            name = frame.f_code.co_filename
            if name not in self._ours:
                self._ours[name] = name.startswith(OURS)
            return line if self._ours[name] else None

        sys.settrace(enter)
        try:
            call()
        finally:
            sys.settrace(None)
        more = not now <= self.steps
        self.steps |= now
        return more


def explore(
    bench: Bench, target: str, cases: int, seed: int, seeds: list[Case], found: list[dict[str, Any]]
) -> tuple[int, list[Case]]:
    """So many changed forms of the cases that reach most. Number of steps reached, and the cases
    that reached something first.
    """
    generator = random.Random(seed)
    reached = Reached()
    kept = list[Case]()

    def keep(case: Case) -> None:
        is_case: list[bool] = []
        if (
            reached.more_by(lambda: is_case.append(try_one(bench, target, case, found)))
            and is_case[0]
        ):
            kept.append(case)

    for case in seeds:
        keep(case)
    for _ in range(cases):
        if len(found) >= MOST_FOUND:
            break
        # The newest are where something may be left to find.
        newest = kept[-1 - int(len(kept) * generator.random() ** 2) :][0]
        keep(mutated(newest, generator))
    return len(reached.steps), kept


def read_corpus(file: Path | None, target: str) -> list[Case]:
    lines = file.read_text().splitlines() if file and file.is_file() else []
    return [entry["case"] for entry in map(json.loads, lines) if entry["target"] == target]


def add_to_corpus(file: Path, target: str, cases: list[Case]) -> None:
    """Cases that are not there yet, the smallest ones; a corpus is for reading too."""
    known = {json.dumps(case) for case in read_corpus(file, target)}
    texts = sorted(
        {text for text in map(json.dumps, cases) if len(text) <= LONGEST_KEPT} - known,
        key=lambda text: (len(text), text),
    )
    with file.open("a") as stream:
        stream.writelines(
            json.dumps({"target": target, "case": json.loads(text)}) + "\n"
            for text in texts[: max(0, MOST_KEPT - len(known))]
        )


def hunt(
    bench: Bench, target: str, cases: int, seed: int, drawn: list[Case]
) -> tuple[int, list[dict[str, Any]]]:
    """Number of cases tried, and what was found: what happened, and the smallest case. Some of what
    was drawn is added to `drawn`.
    """
    import hypothesis  # Not needed to replay what was found.
    from fuzz_cases import strategies

    tried = 0
    found = []
    last = {}
    phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)
    settings = {"database": None, "deadline": None, "phases": phases, "report_multiple_bugs": False}
    while tried < cases and len(found) < MOST_FOUND:
        last.clear()

        @hypothesis.settings(
            max_examples=1 + (cases - tried) // (1 + MUTATIONS),
            suppress_health_check=list(hypothesis.HealthCheck),
            **settings,
        )
        @hypothesis.seed(seed + len(found))
        @hypothesis.given(strategies()[target])
        def one(case: Case) -> None:
            nonlocal tried
            tried += 1 + MUTATIONS
            drawn.extend([copy.deepcopy(case)] if len(drawn) < SEEDS else [])
            try_mutants(bench, target, case, seed + tried, found)
            try:
                attempt(bench, target, case)
            except (Exception, Hang) as error:
                what = place(error)
                if isinstance(error, Hang):  # Making it small would take hours.
                    found.append({"target": target, "what": what, "case": case})
                elif all(entry["what"] != what for entry in found):
                    last.update(target=target, what=what, case=case)
                    raise Breach(what) from None

        try:
            one()
            break
        except Exception:
            if not last:  # It is not the reader's.
                raise
            found.append(dict(last))
            say(f"  {target}: {last['what']}")
    return tried, found


class Breach(Exception):
    """Something other than one of our errors came out."""


def place(error: BaseException) -> str:
    """Kind and place of an error: the last of our own lines that it went through, this script's
    included.
    """
    ours = ("/heads/", "/medusa_ppo/", Path(__file__).name)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if any(part in frame.filename for part in ours)
    ]
    name = Path(frames[-1].filename).name if frames else HARNESS
    return (
        f"{type(error).__name__} at {HARNESS if name == HARNESS else f'{name}:{frames[-1].lineno}'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--only", nargs="*", choices=TARGETS, default=TARGETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--corpus", type=Path, help="cases to begin with, and where those go that reach more"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    datasets.disable_progress_bars()
    total = Counter[str]()
    all_found = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as home:
        datasets.config.HF_DATASETS_CACHE = Path(home) / "cache"
        bench = Bench(Path(home))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.RLIM_INFINITY))
        for target in options.only:
            began = time.monotonic()
            cases = max(1, int(options.cases * SLOW.get(target, 1.0)))
            drawn = read_corpus(options.corpus, target)
            reached = ""
            total[target], found = hunt(
                bench, target, cases // 2 if options.corpus else cases, options.seed, drawn
            )
            if options.corpus:
                steps, kept = explore(bench, target, cases // 2, options.seed, drawn, found)
                total[target] += len(drawn) + cases // 2
                add_to_corpus(options.corpus, target, kept)
                reached = f"  {steps:,} steps reached, first by {len(kept)}"
            all_found += found
            say(
                f"{target:<10} {total[target]:>9,} cases  {len(found)} found "
                f" {time.monotonic() - began:6.0f} s{reached}"
            )
    for entry in all_found:
        say(json.dumps(entry))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    say(f"{total.total():,} cases, {len(all_found)} found, peak {peak} MiB")
    if options.json:
        options.json.write_text(
            json.dumps({"cases": total, "found": all_found, "peak_mib": peak}, indent=1) + "\n"
        )
    return 1 if all_found else 0


if __name__ == "__main__":
    sys.exit(main())

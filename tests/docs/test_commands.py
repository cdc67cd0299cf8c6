"""Commands in the documents' blocks: the program takes each `medusa-ppo` line as shown, and each
command, whatever its program, is run by a test or marked with the reason why it is not.

Nothing is run here. A line with brackets, bars or dots in it is a synopsis, and not parsed.
"""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer

from medusa_ppo.cli import feed_commands
from medusa_ppo.cli.app import app
from medusa_ppo.cli.companion_commands import serve

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "heads/FORMAT.md"]
SYNOPSIS = re.compile(r"\[|\.\.\.|\|")


SHELL = re.compile(
    r"(?:[A-Z][A-Z0-9_]*=\S+ +)*(?:taskset -c \d+ +)?"
    r"(medusa-ppo (?:(?:bench|feed|companion) )?[a-z-]+|python [\w/]+\.py"
    r"|(?:make|ray|kubectl|vllm|pip|uv|git) [a-z-]+|torchrun|export)(?: |$)"
)
# Command -> the file that runs it on something real, and what of it stands there.
RUN_BY = {
    "make check": (".ci/run", "make check"),
    "make demo": ("tests/medusa_ppo/ppo/test_loop_end_to_end.py", "demo"),
    "make setup": (".ci/run", "make setup"),
    "make test": (".ci/run", "make test"),
    "medusa-ppo bench companion": ("tests/medusa_ppo/bench/test_commands.py", '"companion"'),
    "medusa-ppo bench rollout": ("tests/medusa_ppo/bench/test_commands.py", "test_rollout"),
    "medusa-ppo check-setup": ("tests/medusa_ppo/cli/test_check_setup.py", '"check-setup"'),
    "medusa-ppo check-loop": ("tests/medusa_ppo/loops/test_check_loop.py", "check_loop"),
    "medusa-ppo companion serve": ("tests/medusa_ppo/loops/test_tap.py", '"serve"'),
    "medusa-ppo convert": ("tests/medusa_ppo/offline/test_convert.py", "convert"),
    "medusa-ppo doctor": ("tests/medusa_ppo/cli/test_machine_checks.py", "doctor"),
    "medusa-ppo eval": ("tests/medusa_ppo/offline/test_train_and_eval.py", "eval"),
    "medusa-ppo feed list": ("tests/medusa_ppo/cli/test_feed_commands.py", '"list"'),
    "medusa-ppo feed serve": ("tests/medusa_ppo/cli/test_feed_commands.py", '"serve"'),
    "medusa-ppo feed verify": ("tests/medusa_ppo/cli/test_feed_commands.py", '"verify"'),
    "medusa-ppo plan": ("tests/medusa_ppo/cli/test_plan.py", '"plan"'),
    "medusa-ppo ppo": ("tests/medusa_ppo/ppo/test_resume.py", '"ppo"'),
    "medusa-ppo predict": ("tests/medusa_ppo/predict/test_predict_command.py", "predict"),
    "medusa-ppo push": ("tests/medusa_ppo/offline/test_hub.py", "push"),
    "medusa-ppo report": ("tests/medusa_ppo/cli/test_cli.py", "report"),
    "medusa-ppo serve": ("tests/medusa_ppo/loops/conftest.py", '"serve"'),
    "medusa-ppo train": ("tests/medusa_ppo/offline/test_train_and_eval.py", "train"),
    "python tests/robustness/faults.py": ("tests/robustness/test_faults.py", '"faults"'),
    "python tests/robustness/soak.py": ("tests/robustness/test_soak.py", '"soak"'),
    "ray job": ("tests/medusa_ppo/test_ray_job.py", "ray job submit"),
    "torchrun": ("tests/medusa_ppo/loops/test_trl_grpo_ranks.py", "torchrun"),
}
NOT_RUN = {
    "export": "sets a variable for the lines after it",
    "git clone": "needs the network",
    "kubectl apply": "needs a Kubernetes cluster; tests/test_kuberay.py checks the manifest",
    "kubectl get": "needs a Kubernetes cluster",
    "make docs": "installs mkdocs from the network",
    "medusa-ppo feed forget": "needs a feed in Ray; tests/medusa_ppo/feeds has it",
    "make test-chaos": "takes an hour; tests/robustness/test_chaos.py runs some of its faults",
    "make test-gpu": "needs a GPU",
    "make test-slow": "is itself tests, run before a release",
    "pip install": "needs the network",
    "python benchmarks/companion_defaults.py": "takes an hour; tests/benchmarks has its parts",
    "python benchmarks/grown_actor.py": "a benchmark; tests/medusa_ppo/demo grows actors",
    "python benchmarks/curves.py": "a benchmark of an hour; tests/benchmarks has its figures",
    "python benchmarks/same_responses.py": "a benchmark; it needs an actor and its heads",
    "python benchmarks/trl_pairs.py": "a benchmark of an hour; the TRL tests import its parts",
    "python examples/trl_grpo.py": "takes minutes; loops/test_trl_grpo.py trains with its class",
    "python tests/robustness/load.py": "takes minutes; run before a release",
    "ray start": "joins machines; tests/medusa_ppo/test_ray_job.py starts a cluster itself",
    "uv pip": "installs the wheel; `make test-wheel` does the same",
    "vllm serve": "vLLM's own; tests/medusa_ppo/engines/test_self_feeding.py has the engine",
}


def lines(page: Path) -> list[str]:
    """Commands in fenced and in indented blocks, comments cut off."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(?:sh|bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (.*)$", text, re.MULTILINE)
    block = re.sub(r"\\\n\s*", " ", "\n".join([*fenced, *indented]))
    found = [re.sub(r"\s+#.*$", "", line.strip()) for line in block.splitlines()]
    return [line for line in found if line.startswith("medusa-ppo ") and not SYNOPSIS.search(line)]


COMMANDS = [(page.name, line) for page in PAGES for line in lines(page)]


def every_command(page: Path) -> set[str]:
    """Program and command of each line in blocks for a shell, synopses included."""
    text = page.read_text(encoding="utf-8")
    # All blocks, or the end of one in another language would look like the start of one.
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    fenced = [block for language, block in blocks if language in ("", "sh", "bash")]
    indented = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    return {
        found[1]
        for line in "\n".join([*fenced, *indented]).splitlines()
        if (found := SHELL.match(line.strip()))
    }


def test_each_command_is_run_or_marked() -> None:
    shown = {command for page in PAGES for command in every_command(page)}
    assert shown == RUN_BY.keys() | NOT_RUN.keys()
    assert not RUN_BY.keys() & NOT_RUN.keys()


@pytest.mark.parametrize("command", RUN_BY)
def test_the_file_that_runs_a_command_has_it(command: str) -> None:
    file, text = RUN_BY[command]
    assert text in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_some() -> None:
    assert {"quickstart.md", "choosing.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_takes_what_is_shown(page: str, line: str) -> None:
    command = typer.main.get_command(app)
    rest = shlex.split(line)[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest[0]]
        rest = rest[1:]
    command.make_context(line, list(rest))


def test_the_packages_for_gpus_are_not_installed_with_a_torch_for_cpus() -> None:
    """Of a version without `+cu...` the CPU's index has a build, too. As in the Makefile."""
    blocks = [
        block
        for page in PAGES
        for block in re.findall(
            r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        if "requirements-c" in block
    ]
    assert {file for block in blocks for file in re.findall(r"requirements-c\w+", block)} == {
        "requirements-cpu",
        "requirements-cuda",
    }
    for block in blocks:
        assert ("requirements-cuda" in block) != ("--torch-backend cpu" in block), block


LISTENING = {"medusa-ppo feed serve": feed_commands.serve, "medusa-ppo companion serve": serve}
ELSEWHERE = "feeds.md#on-several-nodes"


def section(page: str, heading: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.search(rf"\n##+ {heading}\n(.*?)(?=\n##+ |\Z)", text, re.DOTALL)
    assert found is not None, heading
    return found[1]


def test_each_address_of_another_node_has_a_command_that_listens_there() -> None:
    """The only companion on any page listened on loopback, and three loops were told to reach it at
    HOST.
    """
    defaults = {
        str(inspect.signature(command).parameters["port"].default): words
        for words, command in LISTENING.items()
    }
    seen = set()
    for page in sorted((ROOT / "docs").glob("*.md")):
        for part in re.split(r"\n##+ ", page.read_text(encoding="utf-8")):
            ports = set(re.findall(r"http://HOST:(\d+)", part))
            shown = part
            if ELSEWHERE in part:
                shown += section("feeds.md", "On several nodes")
            lines = shown.replace("\\\n", " ").splitlines()
            for port in ports:
                words = defaults[port]
                assert any(line.startswith(words) and "--host 0.0.0.0" in line for line in lines), (
                    f"{page.name}: {part.splitlines()[0]}: nothing listens at HOST:{port}"
                )
            seen |= ports
    assert seen == defaults.keys()


def test_a_page_says_that_a_tap_needs_its_companion_at_the_start() -> None:
    """It ends the training on every rank, after models and engines have been loaded."""
    assert "ends the training" in section("feeds.md", "On several nodes")

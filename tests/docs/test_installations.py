"""What docs/hooks.md says of the vLLM that each loop's installation brings is what the code lets it
do. (`make installs` resolves the lines themselves.)
"""

from __future__ import annotations

import re
from pathlib import Path

from medusa_ppo.vllm_plugin.vllm_versions import has_graphs, has_v2

ROOT = Path(__file__).resolve().parents[2]


def on_a_gpu(version: str) -> str:
    """What the table of installations says of a vLLM."""
    if has_graphs(version):
        return "Recorded"
    return "V2, not recorded" if has_v2(version) else "V1 alone"


def test_the_table_of_installations_says_what_each_vllm_can_do_on_a_gpu() -> None:
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| `pip install .*\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    said = dict.fromkeys(("TRL", "verl", "OpenRLHF"), "")
    for loop, brings, can in rows:
        if found := re.search(r"vLLM (\S+),", brings):
            assert can.startswith(on_a_gpu(found[1])), f"{loop}: {can}"
            said[loop] = can
    assert all(said.values())
    # What TRL's row names as the way out.
    pinned = (ROOT / "requirements-cuda.txt").read_text(encoding="utf-8")
    versions = dict(re.findall(r"^(trl|vllm)==(\S+)$", pinned, re.MULTILINE))
    ours = re.search(r"of `make setup`\*\*, which has TRL (\S+) and vLLM (\S+)", said["TRL"])
    assert ours and "**Recorded" in said["TRL"] and on_a_gpu(versions["vllm"]) == "Recorded"
    assert versions["trl"].startswith(ours[1]) and versions["vllm"].startswith(ours[2])

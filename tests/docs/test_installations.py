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
        return "**V2, recorded**"
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
    # TRL's line brings the vLLM of the lock file, with which figures on a GPU were taken.
    pinned = (ROOT / "requirements-cuda.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^vllm==(\S+)$", pinned, re.MULTILINE)
    assert said["TRL"] == on_a_gpu(version) == "**V2, recorded**"

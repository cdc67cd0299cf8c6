"""What a run did: metrics.jsonl in; summary.json, report.md and one self-contained report.html out (no torch)."""

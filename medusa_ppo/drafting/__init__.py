"""Drawing and verifying drafts on tensors; knows no engine."""

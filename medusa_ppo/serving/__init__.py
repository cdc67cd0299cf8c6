"""The vLLM side: plug-in, proposer, verification, worker extension, and the engines that roll out."""

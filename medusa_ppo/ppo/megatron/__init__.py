"""The learner of the reference loop on Megatron ranks."""

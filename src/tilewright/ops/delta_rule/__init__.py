"""The delta rule and its gated relatives: DeltaNet, Gated DeltaNet, Kimi Delta Attention. The public ops are in `api`."""

"""The delta rule and its gated relatives: DeltaNet, Gated DeltaNet and Kimi Delta Attention. The public ops are in `api`."""

"""The delta rule and its gated relatives: DeltaNet, Gated DeltaNet, Kimi Delta Attention. `api` has the public ops."""

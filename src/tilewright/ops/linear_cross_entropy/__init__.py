"""Cross entropy of a linear projection, without the logits in memory. The public function is in `api`."""

"""Products with bias, activation and residual, of float and quantised operands. The public function is in `api`."""

"""Products of rows that are sorted by group with the matrix of their group. The public function is in `api`."""

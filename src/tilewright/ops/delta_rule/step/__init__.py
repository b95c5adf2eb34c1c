"""One token of the delta rule and its relatives, for decoding."""

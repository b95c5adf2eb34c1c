"""The comparison that started all this: delta-rule layers beside softmax attention, in speed, numerics and recall."""

"""Compares delta-rule layers with softmax attention in speed, memory, numerics and recall: the project's main job."""

"""Mosaic TPU kernels: named arguments, block specs, VMEM estimates."""

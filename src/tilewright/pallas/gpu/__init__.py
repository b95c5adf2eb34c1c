"""Mosaic GPU kernels: named arguments, pipelines, tile schedulers, the GEMM main loop, wgmma."""

"""An op family whose kernels have a fault on request, to test that the workbench finds it."""

"""An op family whose kernels have a fault on request, to see that the workbench finds it."""

"""Checks, times and scaffolds any registered op. It knows no op by name."""

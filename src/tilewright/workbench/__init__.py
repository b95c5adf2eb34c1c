"""Check, time and scaffold any registered op. Knows no op by name."""

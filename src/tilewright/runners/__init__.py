"""Ship a command somewhere, watch it, and bring back what it made. Knows no op."""

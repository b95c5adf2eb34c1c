"""Run a command on this machine or another one, follow its log, and fetch its files. Imports no op."""

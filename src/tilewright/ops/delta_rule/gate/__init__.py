"""`kda_gate`: the log-decays of KDA from a raw projection."""

"""`kda_gate_of_product`: the log-decays of KDA, with the product that they are computed from."""

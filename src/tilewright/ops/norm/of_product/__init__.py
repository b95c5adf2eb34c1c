"""`gated_rms_norm_of_product`: the norm and gate behind a linear attention, with the product that the gate is."""

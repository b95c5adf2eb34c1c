"""`decode_residual`: a product that is added to the residual stream, and the norm of the sum, for few rows."""

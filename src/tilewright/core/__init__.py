"""What every op stands on and no op is known to: shapes, chips, dispatch, numerics, records."""

"""Which tokens run in the next step. Integers and lists only; no torch."""

"""Who owns which block of K/V memory: integers only, and never torch."""

"""P-EAGLE head: EAGLE-3's layers over mask tokens, which predict all tokens of a draft at once."""

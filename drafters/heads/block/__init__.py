"""Block heads, DFlash and DSpark: one pass predicts a block of tokens."""

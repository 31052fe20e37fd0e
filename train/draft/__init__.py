"""Draft models as they are trained: their layers over packed text, LoRA beside them, what is saved of them."""

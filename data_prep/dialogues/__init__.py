"""Files of conversations in, masked tokens out."""

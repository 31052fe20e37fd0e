"""The shared decoding loop and its parts."""

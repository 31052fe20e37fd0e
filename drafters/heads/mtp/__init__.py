"""MTP layer: the next-token-prediction layer that many targets ship beside their own layers."""

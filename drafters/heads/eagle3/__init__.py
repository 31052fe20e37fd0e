"""EAGLE-3 head: decoder layers that read several states of the target."""

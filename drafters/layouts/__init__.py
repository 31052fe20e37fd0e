"""The forms in which released heads and other engines store a drafter."""

"""Optional: choose the shape of drafts by measured costs and acceptance. Attached to a drafter from outside."""

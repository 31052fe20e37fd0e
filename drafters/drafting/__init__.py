"""What several methods draft with: draft models, tree plans, beams, phrase pools."""

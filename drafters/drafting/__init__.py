"""Parts that several methods draft with: draft models, tree plans, beam search, phrase pools, retrieval."""

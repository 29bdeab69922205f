"""Who holds which tokens, heads and documents, and the way from one split to the other."""

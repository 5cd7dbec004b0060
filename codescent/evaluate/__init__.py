"""In: what a model answers, and what would have been right. Out: texts, scores, a file of predictions.
Does not run a model: whoever calls does, and gives its logits. Needs no torch."""

"""In: tokens of a text. Out: samples with masked tokens, which are the targets.
Does not know a layout."""

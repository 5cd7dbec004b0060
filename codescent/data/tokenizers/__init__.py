"""In: text, or token ids. Out: the token ids of the text, or the text of the ids.
Does not read a corpus."""

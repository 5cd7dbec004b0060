"""In: text. Out: tokens, and text again.
Does not read a corpus."""

"""In: tokens of a text. Out: how well each next token is predicted.
Does not know a layout."""

"""In: lines of a text. Out: each line and its reverse, or its copy, as a source and a target.
Does not know a layout."""

"""In: files of vectors, or a seed. Out: samples whose inputs and targets are vectors.
Does not know a layout."""

"""In: tensors by name, each this rank's box of a whole. Out: folders that hold them all, complete or absent.
Does not know a model, a layout or an optimizer."""

"""In: sizes of an encoder-decoder. Out: its parameter list (declare.py, no torch) and its torch module (module.py).
Does not know how the model is split over ranks."""

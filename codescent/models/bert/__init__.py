"""In: sizes of a BERT. Out: its parameter list (declare.py, without torch) and its torch module (module.py).
Does not know how the model is split over ranks."""

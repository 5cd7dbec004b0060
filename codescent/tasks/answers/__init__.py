"""In: questions with a context (SQuAD's form). Out: windows to train on, answers, and their scores.
Does not know a layout."""

"""In: prompts with responses, or conversations. Out: samples in which the responses alone are targets.
Does not know a layout."""

"""In: a topic and a plan. Out: a lesson: what a strategy does with this model, as text, page, picture or notes.
Does not train: what is shown is of the plan, of its simulation, or of a few ranks that send a small array."""

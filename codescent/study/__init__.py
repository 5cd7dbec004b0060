"""In: a study file: base config, axes, kind, baseline. Out: its points run or collected, their table, fits and words.
Does not draw and makes no page (report/ does), and never imports train: each point is a run of its own."""

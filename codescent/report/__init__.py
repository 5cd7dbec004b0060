"""In: runs and studies. Out: figures, an HTML page, Markdown, and the evaluation of profiles.
Does not run or measure anything, and needs no network: a page is one file that contains all it shows."""

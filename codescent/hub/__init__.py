"""In: names of a hub of Hugging Face, such as hf://Qwen/Qwen3-0.6B. Out: their files in the cache of huggingface_hub.
Does not read what the files say: configs, tensors and texts are the work of other rooms."""

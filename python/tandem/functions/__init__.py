"""Functions of scores and masks: how they are traced, and the text that they become."""

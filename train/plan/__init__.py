"""From a model, dialogues and a time to the commands that make a drafter: what is there, how fast it is, what to do."""

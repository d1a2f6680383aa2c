"""The recipe that trains the built-in voice: text, teacher speech, tokenizer, training, evaluation."""

"""Speech over HTTP: the OpenAI speech API over an engine in a process of its own. Loads no torch."""

"""Load on a speech server and what its listeners hear of it: any server of the OpenAI speech API. Knows no engine."""

"""Load generator for any server of OpenAI's speech API."""
